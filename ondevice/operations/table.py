"""The table of the operations that a bundle may hold, by which a manifest is decoded."""

from __future__ import annotations

from ondevice.operations.attention import Attention
from ondevice.operations.elementwise import Elementwise
from ondevice.operations.embedding import Embedding
from ondevice.operations.head import Head
from ondevice.operations.linear import Linear

Stored = Embedding | Linear | Attention | Elementwise | Head
