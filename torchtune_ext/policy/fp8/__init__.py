"""FP8 in 128-blocks.

plan.py chooses the layers, linear.py is the layer, vllm_plugin.py brings what a CPU engine lacks.
"""
