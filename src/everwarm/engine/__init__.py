"""From tokens to tokens: the loop that batches sequences, and sampling."""
