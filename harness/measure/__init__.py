"""Measurements: commands in fresh processes, repeated in turn, and the machine they ran on."""
