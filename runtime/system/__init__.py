"""The machine a run is on: BLAS, device, heap, and the footprint of the process."""
