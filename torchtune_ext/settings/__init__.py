"""Parse YAML and command-line overrides into the typed settings of a recipe."""
