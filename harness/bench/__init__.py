"""Benchmarks: the tables of papers, and measurements of our own."""
