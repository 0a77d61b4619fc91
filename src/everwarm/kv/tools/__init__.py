"""What `everwarm agents` does with a store: inventory, verification, garbage collection, export and import."""
