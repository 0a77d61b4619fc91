"""Weights: the GGUF file, what its tensors mean, and the one cache that owns them in memory."""
