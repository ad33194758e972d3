"""The table of kernels: the kernel that runs each operation of a lowered program."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.operations.attention import Attention
from ondevice.operations.base import Operation
from ondevice.operations.cached_attention import CachedAttention
from ondevice.operations.elementwise import Elementwise
from ondevice.operations.embedding import Embedding
from ondevice.operations.gated import Gated
from ondevice.operations.linear import Linear
from ondevice.operations.placed import Placed
from ondevice.operations.tiled import Tiled
from runtime.engine.kernels.attention import AttentionKernel
from runtime.engine.kernels.base import Kernel, Tools
from runtime.engine.kernels.cached_attention import CachedAttentionKernel
from runtime.engine.kernels.elementwise import ElementwiseKernel
from runtime.engine.kernels.embedding import EmbeddingKernel
from runtime.engine.kernels.gated import GatedKernel
from runtime.engine.kernels.linear import LinearKernel
from runtime.engine.kernels.placed import PlacedKernel
from runtime.engine.kernels.tiled import TiledKernel

KERNELS: dict[type[Operation], Callable[[Tools], Kernel]] = {
    Embedding: EmbeddingKernel,
    Linear: LinearKernel,
    Attention: AttentionKernel,
    Elementwise: ElementwiseKernel,
    Gated: GatedKernel,
    Placed: PlacedKernel,
    CachedAttention: CachedAttentionKernel,
    Tiled: TiledKernel,
}
