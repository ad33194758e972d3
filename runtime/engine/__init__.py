"""Running lowered programs with MLX."""
