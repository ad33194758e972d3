"""The log from which a zeroth-order run can be rebuilt: a few bytes a step.

`trajectory.jsonl` begins with a header (`runtime.methods.zeroth.log_header`); then one line a step:
`[rate, [what the direction of each query is multiplied by]]`, in MeZO the projected gradients, or
`[rate, null]` for a step that was skipped because a loss was not finite. A descent may add a list
of numbers of its own: `[rate, [...], [...]]`. Floats are written so that they read back to the same
bits.
"""

from __future__ import annotations

import math
from pathlib import Path

from runtime.bundle.manifest import Manifest
from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_file
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent
from runtime.methods.zeroth.log_fields import check_fields, descent_in, trained_in
from runtime.methods.zeroth.log_header import Header, digest
from runtime.methods.zeroth.scalar_update import Update


def read_log(path: Path) -> tuple[Header, list[Update | None]]:
    """The header, and every step's update (None if it was skipped).

    Raises:
        BundleError: the file is not a log, or is damaged.
    """
    try:
        lines = read_file(path).decode().splitlines(keepends=True)
        if not lines[-1].endswith("\n"):
            lines.pop()  # the process died while it wrote this step's line
        facts = from_json(lines[0])
        if not isinstance(facts, dict):
            raise ValueError("its first line is no header")
        header = Header.of(facts)
        check_fields(header.more)
        descent = descent_in(header.more)
        steps = enumerate(lines[1:])
        return header, [_update(header, descent, step, line) for step, line in steps]
    except (OSError, ValueError, TypeError, IndexError, OverflowError) as problem:
        raise BundleError(f"{path} is not a trajectory that can be replayed: {problem}") from None


def _update(header: Header, descent: type[Descent], step: int, line: str) -> Update | None:
    rate, gradients, *more = from_json(line)
    if gradients is None and not more:
        return None
    if len(more) > 1 or [] in (gradients, *more):
        raise ValueError(f"line {step + 2} holds an empty list, or too many")
    extras = more[0] if more else []
    values = [rate, *gradients, *extras]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
        raise ValueError(f"line {step + 2} holds a value that is no finite number")
    first, second = (tuple(map(float, numbers)) for numbers in (gradients, extras))
    try:
        descent.check_extras(first, second)
    except ValueError as problem:
        raise ValueError(f"line {step + 2} {problem}") from None
    return Update(step, float(rate), first, header.weight_decay, second)


def rebuild(header: Header, updates: list[Update | None], initial: Adapters) -> Adapters:
    """The adapters after all updates, equal to the trained ones bit for bit.

    Raises:
        BundleError: the log does not belong to the bundle or to the initial adapters.
    """
    manifest, fields = initial.manifest, header.more
    check_belongs(header, manifest)
    if (sha256 := digest(initial)) != header.initial_sha256:
        raise BundleError(
            f"the trajectory starts from other adapters (SHA-256 {header.initial_sha256[:12]}) "
            f"than these ({sha256[:12]}); name the ones it started from with --initial"
        )
    noise = Noise.of_log(header.seed, header.noise, fields)
    descent = descent_in(fields).of_log(fields, manifest)
    tensors = dict(initial.tensors)
    trained = trained_in(fields, tensors)
    for update in updates:
        if update is not None:
            try:
                descent.remember(update)
            except ValueError as problem:
                raise BundleError(f"step {update.step} of the trajectory: {problem}") from None
            for name in trained:
                tensors[name] = descent.apply(noise, name, tensors[name])
    return Adapters(manifest, tensors)


def check_belongs(header: Header, manifest: Manifest) -> None:
    """Raise BundleError if a log is of other weights than those of the bundle."""
    if header.weights_sha256 != manifest.weights_sha256:
        raise BundleError(
            f"the trajectory was logged on other weights (SHA-256 {header.weights_sha256[:12]}), "
            f"the bundle's are {manifest.weights_sha256[:12]}"
        )
