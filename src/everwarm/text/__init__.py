"""Text to tokens and back, and the chat template in between."""
