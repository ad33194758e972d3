"""Slow, obvious reference implementations, with which every fast path is compared."""
