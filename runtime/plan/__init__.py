"""Lowering programs to instructions, and choosing the plan that a memory budget allows."""
