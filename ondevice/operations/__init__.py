"""The operations that a block can consist of, one file each: all but the code that runs them.

An operation's file says which values it reads and computes, which values its backward reads, how
its shapes are checked, and how many bytes it needs while it runs. Its kernel has the same name in
`runtime.engine.kernels`. Everything here is arithmetic: it imports neither MLX nor NumPy.
"""
