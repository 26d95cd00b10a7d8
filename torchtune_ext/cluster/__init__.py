"""A run on a Ray cluster: Ray places trainer and servers, torchrun trains, vLLM serves."""
