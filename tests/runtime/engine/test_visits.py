"""Visits of blocks: what is read ahead and freed when, in both directions and after errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bundles import Tiny
from support.models import model_of

from runtime.arrays.stored import Block
from runtime.engine.model import Model
from runtime.engine.visits import visit, visits

Said = list[tuple[str, int]]


@pytest.fixture
def model(tiny: Tiny) -> Model:
    return model_of(tiny("gemma3"), 16)  # four blocks or more


@pytest.fixture
def said(model: Model, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What is asked of the model, with the index of the block."""
    told: Said = []

    def tells(what: str) -> Callable[[Model, Block], None]:
        return lambda model, block: told.append((what, model.blocks.index(block)))

    for what in ("read_ahead", "release"):
        monkeypatch.setattr(Model, what, tells(what))
    return told


def test_forward(model: Model, said: Said) -> None:
    """The next block is asked for before the current one is used, the head after the last layer."""
    last = len(model.blocks) - 2
    for layer in visits(model):
        assert layer.block is model.blocks[layer.index]
        said.append(("use", layer.index))
    steps = ((("read_ahead", at + 1), ("use", at), ("release", at)) for at in range(1, last + 1))
    assert said == [step for of_layer in steps for step in of_layer]


def test_backward(model: Model, said: Said) -> None:
    """Before the last block to visit, none is asked for; a block may be freed early, and once."""
    first, last = 2, len(model.blocks) - 2
    for layer in visits(model, range(first, last + 1), "backward"):
        said.append(("use", layer.index))
        layer.release()
        said.append(("update", layer.index))
    expected: Said = []
    for at in range(last, first - 1, -1):
        if at > first:
            expected.append(("read_ahead", at - 1))
        expected += [("use", at), ("release", at), ("update", at)]
    assert said == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_profile(model: Model, direction: str) -> None:
    model.profile.on = True
    for _ in visits(model, direction=direction):  # type: ignore[arg-type]
        pass
    labels = [(block.label, direction) for block in model.blocks[1:-1]]
    assert list(model.profile.blocks) == (labels if direction == "forward" else labels[::-1])
    assert all(use.visits == 1 for use in model.profile.blocks.values())


def test_a_block_is_freed_after_an_error(model: Model, said: Said) -> None:
    model.profile.on = True
    with pytest.raises(ZeroDivisionError):
        for layer in visits(model):
            if layer.index == 2:
                raise ZeroDivisionError
    assert said[-2:] == [("read_ahead", 3), ("release", 2)]
    assert model.profile.blocks[model.blocks[2].label, "forward"].visits == 1
    for index in (0, -1):
        said.clear()
        with pytest.raises(ZeroDivisionError), visit(model, index):
            raise ZeroDivisionError
        assert said == [("release", index % len(model.blocks))]


def test_a_block_is_freed_when_nobody_goes_on(model: Model, said: Said) -> None:
    for _ in visits(model):
        break
    assert said == [("read_ahead", 2), ("release", 1)]
