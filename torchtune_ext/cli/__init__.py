"""Command line: the plug-in for `tune`, and `torchtune-ext` with its subcommands."""
