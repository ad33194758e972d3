"""The table of operations that a bundle may hold; what reads a manifest learns of them here."""

from __future__ import annotations

from ondevice.operations.attention import Attention
from ondevice.operations.elementwise import Elementwise
from ondevice.operations.embedding import Embedding
from ondevice.operations.head import Head
from ondevice.operations.linear import Linear

Stored = Embedding | Linear | Attention | Elementwise | Head
