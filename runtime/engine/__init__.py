"""Running lowered programs with MLX: executor, kernels, weights and graphs."""
