"""The components of a run: built, checked, dry-run, described."""
