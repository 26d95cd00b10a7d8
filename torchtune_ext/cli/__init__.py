"""The commands: the plug-in of `tune`, `torchtune-ext` and its subcommands."""
