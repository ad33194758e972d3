"""Measuring fresh processes, repeatedly and in turn."""
