"""llama.cpp's own API: completion, tokenize, apply-template, props."""
