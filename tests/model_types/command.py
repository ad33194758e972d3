"""Tries every model type of the installed mlx-lm, and writes what it found as data and as a page.

transformers runs in the interpreter that ONDEVICE_PEERS_PYTHON names.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from support.pages import ROOT

from export.sources.families import MODEL_TYPES, TEXT_TYPES
from export.sources.general import completed
from export.sources.verified import FILE, tried_types
from model_types.tiny import is_model, model_types
from model_types.trial import NOT_TRIED, difference, made_elsewhere, missing, refusal
from runtime.machine.backend import prepare

PAGE = ROOT / "docs" / "models.md"
NO_CLASS, NOT_COMPARED = "transformers has no class", "not compared"
HEAD = """# Model types

`python -m tests.model_types` wrote this page: it tries tiny random models of every model type of mlx-lm {version}. A type works if the logits are within 1e-5 of those of transformers, relative to the largest, by default and with all settings changed that are not refused by name. Any other type that can be cut is exported only with `--unverified`.

"""  # noqa: E501


def main(words: list[str]) -> int:
    """Compare the types that are named, or all; returns the exit code."""
    prepare()
    states: dict[str, float | str] = {}
    for name in filter(is_model, model_types()):
        why = refusal(name)
        if why is not None:
            states[name] = missing(name, why)
        elif not completed({"model_type": name}):
            states[name] = NO_CLASS
        else:
            known = tried_types().get(name, NOT_COMPARED)
            refused = isinstance(known, str) and not known.startswith(NOT_COMPARED)
            states[name] = NOT_COMPARED if refused else known  # refused before, and cut now
    compared = [
        name
        for name, state in states.items()
        if isinstance(state, float) or state.startswith(NOT_COMPARED)
        if name not in (*MODEL_TYPES, *TEXT_TYPES.values()) and (not words or name in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        made_elsewhere(Path(folder), compared, 7)
        for name in compared:
            states[name] = apart(Path(folder), name)
            states |= {outer: states[text] for outer, text in MODEL_TYPES.items()}
            states |= {outer: states[text] for text, outer in TEXT_TYPES.items()}
            FILE.write_text(json.dumps(states, indent=2) + "\n")
            PAGE.write_text(page(states))
    return 0


def apart(folder: Path, model_type: str) -> float | str:
    """The larger difference of a type's two models from transformers', or why there is none."""
    base, changed = (difference(folder / f"{model_type}{more}") for more in ("", ",changed"))
    print(model_type, base, changed, flush=True)
    if isinstance(base, str):
        return f"{NOT_COMPARED}: {base.replace(str(folder), '')}"
    return float(f"{base if isinstance(changed, str) else max(base, changed):.1e}")


def page(states: dict[str, float | str]) -> str:
    """docs/models.md."""
    from mlx_lm._version import __version__

    from export.sources.verified import CLOSE

    works = {name: d for name, d in states.items() if isinstance(d, float) and d <= CLOSE}
    apart = {name: d for name, d in states.items() if isinstance(d, float) and d > CLOSE}
    unknown = {
        n: w
        for n, w in states.items()
        if isinstance(w, str) and w.startswith((NO_CLASS, NOT_COMPARED))
    }
    refused: dict[str, list[str]] = {}
    for name, why in states.items():
        if isinstance(why, str) and name not in unknown:
            refused.setdefault(why, []).append(name)
    rows = ["| state | types |", "| --- | --- |", f"| {len(works)} work | {', '.join(works)} |"]
    if apart:
        listed = ", ".join(f"{name} ({d:.0e})" for name, d in apart.items())
        rows.append(f"| {len(apart)} unverified: other logits | {listed} |")
    rows.append(f"| {len(unknown)} unverified: not compared | {', '.join(unknown)} |")
    rows += [
        f"| {len(names)} {'' if why == NOT_TRIED else 'refused: '}{why} | {', '.join(names)} |"
        for why, names in sorted(refused.items(), key=lambda item: -len(item[1]))
    ]
    return HEAD.format(version=__version__) + "\n".join(rows) + "\n"
