"""A training run: its folder, its loop, evaluation, resuming and generation."""
