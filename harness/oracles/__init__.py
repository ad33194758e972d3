"""Slow, obvious reference implementations, which every fast path is compared with."""
