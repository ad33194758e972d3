"""Memory-mapped files: weights, activation checkpoints, adapters and moments."""
