"""Learning from measured speed: what a program does, programs to begin with, stages, rewards, the fastest ones, the prompts."""
