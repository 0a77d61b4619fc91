"""KV caches: blocks in memory, agents that own them, the disk that keeps them. Sees bytes and token ids, no model."""
