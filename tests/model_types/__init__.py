"""Every model type of the installed mlx-lm: whether it is exported, and as transformers has it."""
