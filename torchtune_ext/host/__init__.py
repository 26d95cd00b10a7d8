"""How `tune` and the shell meet the library: recipes and configs by name, settings, checks of the machine."""
