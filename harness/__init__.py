"""Measuring and comparing: reference implementations, benchmarks, comparisons, and the demo."""
