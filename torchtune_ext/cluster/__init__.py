"""A run on the machines of a Ray cluster: Ray places trainer and servers, torchrun trains, vLLM serves."""
