"""Sweeps over hyperparameters: files in the format of Weights & Biases, run here without an account (`torchtune-ext sweep`)."""
