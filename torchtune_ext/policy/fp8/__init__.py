"""FP8 in 128-blocks.

plan.py chooses the layers, linear.py is the layer, gain.py says what it gains, vllm_plugin.py brings what a CPU engine lacks.
"""
