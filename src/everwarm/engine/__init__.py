"""From logits to tokens: sampling, and later the loop that batches sequences."""
