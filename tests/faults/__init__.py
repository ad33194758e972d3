"""Runs of several machines whose network delays, loses and parts, and whose processes end."""
