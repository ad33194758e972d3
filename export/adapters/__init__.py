"""Writes trained adapters as other tools read them."""
