"""Decoding one sequence with a key-value cache, block by block.

New tokens pass through the blocks in chunks. Several chunks visit a block together, as batch lanes,
so that each tile of weights is dequantized once for all of them; attention takes them in order. The
last chunk is padded: the keys of padding lie behind all real tokens, which never see them, and the
next tokens' keys take their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.engine.visits import visit, visits
from runtime.methods.adapters import Adapters
from runtime.operations.values import CHUNK_TOKENS
from runtime.run.session import Session

Floats = npt.NDArray[np.float32]


class Decoder:
    """A sequence that grows, its key-value cache, and the model with an adapter that reads it.

    tokens: those whose keys and values the cache holds.
    """

    def __init__(self, session: Session, adapters: Adapters) -> None:
        self.session, self.adapters = session, adapters
        self.tokens: list[int] = []
        self._written = 0  # tokens whose keys have been written, padding among them
        model = session.at(CHUNK_TOKENS)
        self._cache = model.new_cache()
        self._rewinds = all(layer.program.rewinds for layer in model.lowered.layers)
        self._is_whole = True  # whether all layers have seen the same tokens

    @property
    def context(self) -> int:
        """The most tokens that the sequence may have."""
        return self.session.plan.context

    def read(self, tokens: Sequence[int]) -> Floats:
        """Append tokens (at least one). Returns the logits (V,) of the token after the last.

        Raises:
            ValueError: the sequence would be longer than its context.
        """
        if not tokens or len(self.tokens) + len(tokens) > self.context:
            raise ValueError(
                f"{len(tokens)} tokens after {len(self.tokens)}, in a context of {self.context}"
            )
        *earlier, last = self.parts(tokens)
        for part in earlier:
            self.append(part)
        logits = self._pass(last, wanted=True)
        assert logits is not None
        return logits

    def parts(self, tokens: Sequence[int]) -> list[list[int]]:
        """Tokens in order, divided into parts that pass through the blocks together."""
        together = CHUNK_TOKENS * self.session.plan.lanes
        return [list(tokens[at : at + together]) for at in range(0, len(tokens), together)]

    def append(self, part: list[int]) -> None:
        """Append one of several `parts`, whose logits nobody wants."""
        self._pass(part, wanted=False)

    def rewind(self, tokens: Sequence[int]) -> int:
        """Cut the sequence to its common beginning with `tokens`.

        Returns how many tokens stay: all that agree, but the last of `tokens`, which must be
        read for its logits; or none, where a ring no longer holds the keys before.
        """
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
        if common is None:
            common = max(0, min(len(self.tokens), len(tokens) - 1))
        if not self._holds_what_precedes(common):
            common = 0
        if common == 0:
            self._written = 0
        del self.tokens[common:]
        return common

    def _holds_what_precedes(self, position: int) -> bool:
        """Whether every layer still has the keys that a token at this position sees.

        A ring that has gone round has lost all but its window before the last chunk. A state is
        that after the last token, and of no use where a pass did not come to its end.
        """
        if not self._rewinds:
            return self._is_whole and position == len(self.tokens)
        slots = min(array.shape[2] for values in self._cache.values() for array in values.values())
        return self._written <= slots or self._written - position <= CHUNK_TOKENS

    def _pass(self, tokens: list[int], wanted: bool) -> Floats | None:
        """Run tokens through all blocks; the logits after the last, where they are wanted."""
        bucket = 1 if len(tokens) == 1 else CHUNK_TOKENS
        model, first = self.session.at(bucket), len(self.tokens)
        chunks = [np.array(tokens[at : at + bucket]) for at in range(0, len(tokens), bucket)]
        counts = list(map(len, chunks))
        positions = [first + at for at in range(0, len(tokens), bucket)]
        self._is_whole = False
        with visit(model, 0):
            pairs = zip(chunks, positions, strict=True)
            loras = self.adapters.loras(model.blocks[0])
            xs = [model.embed(chunk, loras, first=position) for chunk, position in pairs]
        for layer in visits(model):
            block = layer.block
            loras = self.adapters.loras(block)
            xs = model.decode_lanes(block, xs, loras, positions, counts, self._cache[block])
        self.tokens += tokens
        self._is_whole = True
        self._written = max(self._written, positions[-1] + bucket)
        if not wanted:
            return None
        x = xs.pop()
        xs.clear()
        with visit(model, -1):
            h = model.hidden(x, np.array([len(chunks[-1]) - 1]))
            del x
            return model.logits(h, self.adapters.loras(model.blocks[-1]))
