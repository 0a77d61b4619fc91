"""What `everwarm bench` and `make bench` run. Each prints a table for people and, last, one line of JSON."""
