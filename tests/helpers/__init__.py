"""What tests share: fakes, small models and runs, and readers of what a run wrote."""
