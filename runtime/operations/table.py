"""The table of the operations that a bundle may hold, by which a manifest is decoded."""

from __future__ import annotations

from runtime.operations.attention import Attention
from runtime.operations.elementwise import Elementwise
from runtime.operations.embedding import Embedding
from runtime.operations.head import Head
from runtime.operations.linear import Linear

StoredOperation = Embedding | Linear | Attention | Elementwise | Head
