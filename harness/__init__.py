"""Measuring and comparing: oracles, demos and reports."""
