"""The operations of programs: all that is known of each without running it, a file for each.

An operation's file says which values it takes and makes, what its backward reads, what must hold of
its shapes, and how many bytes it holds while it runs. Its kernel has the same name in
`runtime.engine.kernels`. Everything here is arithmetic: it imports neither MLX nor NumPy.
"""
