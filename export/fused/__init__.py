"""Writes a bundle and an adapter as one model: a checkpoint, a GGUF file, or a bundle again."""
