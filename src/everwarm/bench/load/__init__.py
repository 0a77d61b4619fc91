"""`everwarm bench load`: many agents at once."""
