"""Tries every model type of the installed mlx-lm, and writes what it found as data and as a page.

transformers runs in the interpreter that ONDEVICE_PEERS_PYTHON names.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from support.pages import ROOT

from export.sources.general import completed
from export.sources.verified import FILE, tried_types
from model_types.tiny import is_model, model_types
from model_types.trial import difference, made_elsewhere, missing, refusal
from runtime.machine.backend import prepare

PAGE = ROOT / "docs" / "models.md"
NO_CLASS = "transformers has no class"
HEAD = """# Model types

`python -m tests.model_types` wrote this page: it tries tiny random models of every model type of mlx-lm {version}. A type works if the logits are within 1e-5 of those of transformers, relative to the largest, by default and with each setting changed by itself (or that setting is refused by name). Any other type that can be cut is exported only with `--unverified`.

"""  # noqa: E501


def main(words: list[str]) -> int:
    """Try the types that are named, or all; returns the exit code."""
    prepare()
    states = dict(tried_types()) if words else {}
    chosen = words or [name for name in model_types() if is_model(name)]
    refused = {name: missing(name, why) for name in chosen if (why := refusal(name))}
    none = [name for name in chosen if name not in refused and not completed({"model_type": name})]
    states |= refused | dict.fromkeys(none, NO_CLASS)
    with tempfile.TemporaryDirectory() as name:
        compared = [one for one in chosen if one not in refused and one not in none]
        made_elsewhere(Path(name), compared, 7)
        for model_type in compared:
            states[model_type] = apart(Path(name), model_type)
            print(model_type, states[model_type], flush=True)
    FILE.write_text(json.dumps(dict(sorted(states.items())), indent=2) + "\n")
    PAGE.write_text(page(states))
    return 0


def apart(folder: Path, model_type: str) -> float | str:
    """The larger difference of a type's two models from transformers', or why there is none."""
    base, changed = (difference(folder / f"{model_type}{more}") for more in ("", ",changed"))
    print(model_type, base, changed, flush=True)
    if isinstance(base, str):
        return f"not compared: {base}"
    return float(f"{base if isinstance(changed, str) else max(base, changed):.1e}")


def page(states: dict[str, float | str]) -> str:
    """docs/models.md."""
    from mlx_lm._version import __version__

    from export.sources.verified import CLOSE

    works = {name: d for name, d in states.items() if isinstance(d, float) and d <= CLOSE}
    apart = {name: d for name, d in states.items() if isinstance(d, float) and d > CLOSE}
    unknown = {n: w for n, w in states.items() if isinstance(w, str) and w.startswith(_UNKNOWN)}
    refused: dict[str, list[str]] = {}
    for name, why in states.items():
        if isinstance(why, str) and name not in unknown:
            refused.setdefault(why, []).append(name)
    rows = [
        "| state | types |",
        "| --- | --- |",
        f"| {len(works)} work | {', '.join(works)} |",
        f"| {len(apart)} unverified: other logits | "
        f"{', '.join(f'{name} ({d:.0e})' for name, d in apart.items())} |",
        f"| {len(unknown)} unverified: not compared | {', '.join(unknown)} |",
    ]
    rows += [
        f"| {len(names)} refused: {why} | {', '.join(names)} |"
        for why, names in sorted(refused.items(), key=lambda item: -len(item[1]))
    ]
    return HEAD.format(version=__version__) + "\n".join(rows) + "\n"


_UNKNOWN = (NO_CLASS, "not compared")
