"""What is known, in memory: blocks by the tokens that they hold, where their bytes are, and who needs them."""
