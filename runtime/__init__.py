"""Training from a bundle, one block at a time, inside a memory budget."""
