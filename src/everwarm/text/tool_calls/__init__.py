"""Tool calls in the text of an answer: how each family of models writes them, and a small parser for each way."""
