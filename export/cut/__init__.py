"""Cutting mlx-lm's models into programs of operations and elementwise graphs."""
