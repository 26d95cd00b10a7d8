"""Turns YAML and the words of a command into the typed settings of a recipe."""
