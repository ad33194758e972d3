"""The options of commands that measure and compare."""
