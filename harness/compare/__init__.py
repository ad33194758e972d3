"""Comparing methods: which reaches a quality first, and at what cost."""
