"""Cutting a model of mlx-lm into programs of operations and elementwise graphs."""
