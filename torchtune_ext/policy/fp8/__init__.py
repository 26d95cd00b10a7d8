"""FP8 in 128-blocks: plan.py chooses the layers, linear.py is the layer, vllm_plugin.py is for vLLM on a CPU."""
