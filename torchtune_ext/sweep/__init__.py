"""Hyperparameter sweeps in W&B's file format, run without an account (`torchtune-ext sweep`)."""
