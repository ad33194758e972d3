"""Slow, obvious references that every fast path is compared with."""
