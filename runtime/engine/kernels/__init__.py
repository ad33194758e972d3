"""The kernels of a program, each with a hand-derived backward."""
