"""From a checkpoint to a bundle: the only package that knows foreign formats and models."""
