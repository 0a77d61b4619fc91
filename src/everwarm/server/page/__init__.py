"""The page at `/`: its files, and the data that only it asks for. Everything else it does through the public API."""
