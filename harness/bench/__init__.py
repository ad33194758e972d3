"""Benchmarks: the papers' tables, and this project's own."""
