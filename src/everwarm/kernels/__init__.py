"""Arithmetic. Knows arrays and shapes, nothing of files, models or text."""
