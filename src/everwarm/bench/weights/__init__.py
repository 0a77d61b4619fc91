"""`everwarm bench weights`: what the weight cache does under a budget."""
