"""The machine that a run is on: BLAS, device, heap, control groups, and the process's footprint."""
