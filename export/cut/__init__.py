"""Cutting an mlx-lm model into programs of operations and elementwise graphs."""
