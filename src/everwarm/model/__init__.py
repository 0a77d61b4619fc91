"""The transformer and what a GGUF file says about its shape."""
