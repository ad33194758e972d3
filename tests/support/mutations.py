"""Random changes of documents and of bytes, as an adversary or a broken disk would make them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

Rng = np.random.Generator

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2, 16, 2**31, 2**63, 2**64, 10**400, 0.5, -1e308,
    float("nan"), float("inf"), "", "x", "T", "../x", "/etc/passwd", "graphs", "\ud800", "@x", "~x",
    "a" * 300, [], {}, [[]], [None], {"a": 1}, {"": {}}, ["x", "x"], [1 << 40] * 9,
]  # fmt: skip
ODD_BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def pick(rng: Rng, choices: Any) -> Any:
    """One of several values, as it is: NumPy's own choice would convert it."""
    found = list(choices)
    return found[int(rng.integers(len(found)))]


def children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node))) if isinstance(node, list) else []


def mutate(document: Any, rng: Rng) -> str:
    """Change one thing at a random place; returns what was done."""
    node, path = document, []
    while True:
        keys = children(node)
        key = keys[rng.integers(len(keys))]
        path.append(key)
        if not children(node[key]) or rng.random() < 0.15:
            break
        node = node[key]
    act = str(rng.choice(["junk", "delete", "copy", "nudge", "rename", "swap", "repeat", "add"]))
    if act == "delete":
        del node[key]
    elif act == "copy":  # something well formed, from elsewhere
        other = document
        while children(other) and rng.random() < 0.8:
            keys = children(other)
            other = other[keys[rng.integers(len(keys))]]
        node[key] = copy.deepcopy(other)
    elif act == "nudge" and type(node[key]) is int:
        node[key] += int(rng.choice([-64, -1, 1, 64, 16384]))
    elif act == "rename" and isinstance(node, dict):
        node[str(rng.choice(["x", "", *node]))] = node.pop(key)
    elif act == "swap":
        keys = children(node)
        other = keys[rng.integers(len(keys))]
        node[key], node[other] = node[other], node[key]
    elif act == "repeat" and isinstance(node, list):
        node.insert(int(rng.integers(len(node) + 1)), copy.deepcopy(node[key]))
    elif act == "add" and isinstance(node[key], dict):
        node[key][str(rng.choice(["x", "biases", "window", "scale"]))] = JUNK[
            rng.integers(len(JUNK))
        ]
    else:
        act, node[key] = "junk", JUNK[rng.integers(len(JUNK))]
    return f"{act} at {path}"


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values that hold no others."""
    keys = children(node)
    if not keys:
        return [path] if path else []
    return [leaf for key in keys for leaf in _leaves(node[key], (*path, key))]


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def mutate_alike(document: Any, rng: Rng) -> str:
    """Change one value to another of its type, which a check of types lets through."""
    leaves = _leaves(document)
    *before, key = path = pick(rng, leaves)
    node, old = _at(document, tuple(before)), _at(document, path)
    others = [one for leaf in leaves if type(one := _at(document, leaf)) is type(old)]
    new = pick(rng, others)
    if type(old) is int and rng.random() < 0.7:
        new = pick(rng, (0, 1, -1, 2, old + 1, old - 1, 2 * old, old // 2, old + 64, 1 << 40))
    elif type(old) is float and rng.random() < 0.7:
        new = pick(rng, (0.0, -1.0, 1e-30, 1e30, 2 * old, -old, old / 3))
    elif type(old) is bool:
        new = not old
    node[key] = new
    return f"{old!r:.40} to {new!r:.40} at {list(path)}"


def mutate_bytes(data: bytes, rng: Rng, upto: int | None = None) -> tuple[bytes, str]:
    """Change bytes before `upto` (default: anywhere), or the length; returns what was done."""
    found = bytearray(data)
    end = min(len(found), len(found) if upto is None else upto)
    act = pick(rng, ["flip", "odd", "number", "cut", "grow", "remove", "repeat", "move"])
    at = int(rng.integers(end)) if end else 0
    if not end or act == "grow":
        found += rng.bytes(int(rng.integers(1, 64)))
    elif act == "flip":
        found[at] ^= 1 << int(rng.integers(8))
    elif act == "odd":
        found[at] = pick(rng, ODD_BYTES)
    elif act == "number":  # a little-endian one of 4 or 8 bytes
        width = pick(rng, (4, 8))
        number = pick(rng, (0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(data)))
        at = max(0, min(at, len(found) - width))
        found[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    elif act == "cut":
        del found[at:]
    else:
        size = int(rng.integers(1, 33))
        part = bytes(found[at : at + size])
        if act == "remove":
            del found[at : at + size]
        elif act == "repeat":
            found[at:at] = part * int(rng.integers(1, 4))
        else:
            other = int(rng.integers(end))
            found[other : other + len(part)] = part
    return bytes(found), f"{act} at byte {at} of {len(data)}"
