"""From a checkpoint to a bundle: the only package that reads checkpoint formats and models."""
