"""The arrays of a device, for tests of kernels on each."""

from __future__ import annotations

import mlx.core as mx

from runtime.arrays.arrays import Arrays, arrays_for


def arrays_of(device: str) -> Arrays:
    """A device's arrays, which compute there; a GPU's on the CPU where there is none."""
    if device == "gpu" and mx.is_available(mx.gpu):
        mx.set_default_device(mx.gpu)
    return arrays_for(device)
