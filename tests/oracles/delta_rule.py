"""The gated delta rule token by token, as its paper defines it (arXiv 2412.06464, equation 10)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    begins: Sequence[int] = (),
) -> mx.array:
    """y (1, T, H, E) of q, k (1, T, K, D), v (1, T, H, E), log_decay and beta (1, T, H).

    Rows begin at the tokens `begins`, with a state of zeros.
    """
    repeats = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x, repeats, axis=2) for x in (q, k))
    nothing = mx.zeros((*v.shape[:1], v.shape[2], q.shape[3], v.shape[3]))
    state, found = nothing, []
    for t in range(q.shape[1]):
        if t in begins:
            state = nothing
        state = mx.exp(log_decay[:, t])[..., None, None] * state
        seen = (state * k[:, t, :, :, None]).sum(axis=-2)
        update = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        found.append((state * q[:, t, :, :, None]).sum(axis=-2))
    return mx.stack(found, axis=1)
