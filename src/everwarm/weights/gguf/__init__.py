"""GGUF files, memory-mapped and bounds-checked."""
