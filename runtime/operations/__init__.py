"""The operations that a block can consist of: for each its arithmetic, and beside it its kernel.

`attention.py` says which values attention reads and computes, which values its backward reads, how
its shapes are checked, and how many bytes it needs while it runs. It is arithmetic, and imports
neither MLX nor NumPy. `attention_kernel.py` runs it, forward and backward.
"""
