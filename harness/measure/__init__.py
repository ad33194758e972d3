"""Measurements: commands in fresh processes, repeated alternately, and the machine's facts."""
