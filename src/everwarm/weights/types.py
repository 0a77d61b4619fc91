"""The tensor types of GGUF: how many elements a block holds and how many bytes it takes."""
