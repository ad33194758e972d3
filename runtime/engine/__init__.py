"""Running lowered programs with MLX: the executor, the model's blocks, and its graphs."""
