"""Build, check, dry-run and describe the components of a run."""
