"""The table of kernels: the kernel that runs each operation of a lowered program."""

from __future__ import annotations

from collections.abc import Callable

from runtime.operations.attention import Attention, CachedAttention
from runtime.operations.attention_kernel import AttentionKernel
from runtime.operations.base import Operation
from runtime.operations.cached_attention_kernel import CachedAttentionKernel
from runtime.operations.convolution import CachedConvolution, Convolution
from runtime.operations.convolution_kernel import CachedConvolutionKernel, ConvolutionKernel
from runtime.operations.elementwise import Elementwise, Placed
from runtime.operations.elementwise_kernel import ElementwiseKernel, PlacedKernel
from runtime.operations.embedding import Embedding, Lookup
from runtime.operations.embedding_kernel import EmbeddingKernel, LookupKernel
from runtime.operations.experts import Experts
from runtime.operations.experts_kernel import ExpertsKernel
from runtime.operations.gated import Gated
from runtime.operations.gated_delta import CachedGatedDelta, GatedDelta
from runtime.operations.gated_delta_kernel import CachedGatedDeltaKernel, GatedDeltaKernel
from runtime.operations.gated_kernel import GatedKernel
from runtime.operations.kernel import Kernel, Tools
from runtime.operations.linear import Linear
from runtime.operations.linear_kernel import LinearKernel
from runtime.operations.sliced_mlp import SlicedMlp
from runtime.operations.sliced_mlp_kernel import SlicedMlpKernel

KERNELS: dict[type[Operation], Callable[[Tools], Kernel]] = {
    Embedding: EmbeddingKernel,
    Lookup: LookupKernel,
    Linear: LinearKernel,
    Attention: AttentionKernel,
    Convolution: ConvolutionKernel,
    GatedDelta: GatedDeltaKernel,
    Experts: ExpertsKernel,
    Elementwise: ElementwiseKernel,
    Gated: GatedKernel,
    Placed: PlacedKernel,
    CachedAttention: CachedAttentionKernel,
    CachedConvolution: CachedConvolutionKernel,
    CachedGatedDelta: CachedGatedDeltaKernel,
    SlicedMlp: SlicedMlpKernel,
}
