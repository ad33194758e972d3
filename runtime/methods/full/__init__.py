"""Training all parameters, block by block from the disk."""
