"""`everwarm bench ttft`: time to first token, cold, warm, hot and after a restart."""
