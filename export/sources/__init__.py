"""Checkpoints to export: Hugging Face folders, GGUF files, and random weights."""
