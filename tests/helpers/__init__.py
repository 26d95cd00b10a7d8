"""Shared test code: fakes, small models and runs, and readers of run outputs."""
