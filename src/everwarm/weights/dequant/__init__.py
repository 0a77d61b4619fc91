"""Every tensor type in NumPy, bit-equal to the `gguf` package: the oracle of all kernels."""
