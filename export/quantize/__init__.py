"""Quantizing frozen weights."""
