"""Quantizing the weights that training does not change."""
