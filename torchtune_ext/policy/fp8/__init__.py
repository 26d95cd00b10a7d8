"""FP8 in 128-blocks: which layers, the layer itself, what it gains, and what a CPU engine lacks for it."""
