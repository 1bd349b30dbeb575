"""kvhearth keeps KV cache warm outside HBM for vLLM: it decides, runs and shows offloading."""

__version__ = "0.1.0"
