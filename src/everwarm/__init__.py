"""everwarm: a local LLM runtime for GGUF models that never computes the same thing twice."""
