"""Checkpoint to bundle: the only package that knows foreign formats and model classes."""
