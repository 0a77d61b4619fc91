"""Decode on the work that agents do, with and without drafts, beside llama.cpp with its own."""
