"""What transformers, PEFT and llama.cpp compute, in the interpreters that have them.

ONDEVICE_PEERS_PYTHON names them, as PATH names folders; without it they must be beside the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

PYTHON = "ONDEVICE_PEERS_PYTHON"
SCRIPTS = Path(__file__).parent / "elsewhere"
TORCH = ("torch", "peft", "transformers")
LLAMA = ("cyllama",)
_HAS = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"


def interpreter(*modules: str) -> str:
    """The first interpreter that has these modules.

    Without one, the test is skipped if no interpreters are named, and fails if some are.
    """
    named = os.environ.get(PYTHON, "")
    for python in named.split(os.pathsep) if named else [sys.executable]:
        if _has(python, modules):
            return python
    missing = f"no interpreter has {', '.join(modules)}"
    if named:
        pytest.fail(f"{missing}: {PYTHON} is {named}")
    pytest.skip(f"{missing}; {PYTHON} names interpreters")


@cache
def _has(python: str, modules: Sequence[str]) -> bool:
    return subprocess.run([python, "-c", _HAS, *modules], cwd="/").returncode == 0


@cache
def _forking(python: str, modules: Sequence[str]) -> subprocess.Popen[str]:
    """A process of an interpreter that runs scripts; it ends when this one does."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, str(SCRIPTS / "forking.py"), *modules]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, cwd="/", **pipes)


def run_script(modules: Sequence[str], script: str, *words: object) -> str:
    """Run a script of `support/elsewhere`; returns what it said."""
    process = _forking(interpreter(*modules), tuple(modules))
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([str(SCRIPTS / script), *map(str, words)]) + "\n")
    process.stdin.flush()
    code, said = json.loads(process.stdout.readline())
    assert code == 0, said[-3000:]
    return str(said)


def peft_logits(
    model: Path,
    adapter: Path | str,
    tokens: Sequence[int],
    folder: Path,
    dtype: str = "float32",
    rounded: bool = True,
) -> np.ndarray:
    """(T, V), of transformers with PEFT, which computes in `dtype`.

    `rounded`: whether Gemma's embedding has the factor in bfloat16, as in mlx-lm; else it is
    transformers' own.
    """
    scale = "bfloat16" if rounded else "own"
    out = folder / "peft.npy"
    run_script(TORCH, "peft_logits.py", model, adapter, _listed(tokens), out, dtype, scale)
    return np.asarray(np.load(folder / "peft.npy"))


def several_peft_logits(
    pairs: Mapping[str, tuple[Path, str]], tokens: Sequence[int], folder: Path
) -> dict[str, np.ndarray]:
    """(T, V) by name, as transformers itself computes: of models, each with its adapter or "-"."""
    words: list[object] = []
    for name, (model, adapter) in pairs.items():
        words += [model, adapter, _listed(tokens), folder / f"{name}.npy", "float32", "own"]
    run_script(TORCH, "peft_logits.py", *words)
    return {name: np.asarray(np.load(folder / f"{name}.npy")) for name in pairs}


def llama_logits(
    model: Path, adapter: Path | str, tokens: Sequence[int], folder: Path
) -> np.ndarray:
    """(T, V), of llama.cpp."""
    run_script(LLAMA, "llama_logits.py", model, adapter, _listed(tokens), folder / "llama.npy")
    return np.asarray(np.load(folder / "llama.npy"))


def _listed(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))
