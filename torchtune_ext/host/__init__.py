"""Connects `tune` and the shell with the library: recipes and configs by name, settings, checks of the machine."""
