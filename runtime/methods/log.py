"""The log from which a zeroth-order run can be rebuilt: a few bytes a step.

`trajectory.jsonl` begins with a header (`runtime.methods.log_header`); then one line a step:
`[rate, [the factor of each query's direction]]`, in MeZO the projected gradients, or
`[rate, null]` for a step that was skipped because a loss was not finite. A descent may add a list
of numbers of its own: `[rate, [...], [...]]`. Floats are written so that they read back to the same
bits.

Not every log's header has the same fields. A class that writes fields of its own is a `Part`: it
names them in `log_fields` and checks them in `check_fields`, and has a line in the lists below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from runtime.bundle.manifest import Manifest
from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_file
from runtime.core.notes import Progress, no_progress
from runtime.core.version import __version__
from runtime.methods.adapters import Adapters
from runtime.methods.full.weights import FullWeights
from runtime.methods.log_header import Header, Part
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Averages, Descent, Sgd, Update
from runtime.methods.zeroth.estimator import Estimator
from runtime.methods.zeroth.hizoo import HessianDescent
from runtime.methods.zeroth.layer_scales import ScaledDescent
from runtime.methods.zeroth.zo_act import Coefficients

DESCENTS: tuple[type[Descent], ...] = (Averages, HessianDescent, ScaledDescent)
ESTIMATORS: tuple[type[Estimator], ...] = (Coefficients,)
OWNERS: tuple[type[Part], ...] = (*DESCENTS, *ESTIMATORS, Noise, FullWeights)
T = TypeVar("T", bound=type[Part])


def read_log(path: Path) -> tuple[Header, list[Update | None]]:
    """The header, and every step's update (None if it was skipped).

    Raises:
        BundleError: the file is not a log, or is damaged.
    """
    try:
        lines = read_file(path).decode().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # the process died while it wrote this step's line
        header = _header_of(lines[0] if lines else "")
        descent = descent_in(header.more)
        steps = enumerate(lines[1:])
        return header, [update_of(header, descent, step, line) for step, line in steps]
    except (OSError, ValueError) as problem:
        raise BundleError(f"{path} is not a trajectory that can be replayed: {problem}") from None


def _header_of(line: str) -> Header:
    """The header in the first line. Raises ValueError."""
    try:
        facts = from_json(line)
        if not isinstance(facts, dict):
            raise ValueError(f"it is {line.strip()!r:.80}")
        header = Header.of(facts)
        check_fields(header.more)
    except ValueError as problem:
        raise ValueError(f"line 1, its header: {problem}") from None
    return header


def update_of(header: Header, descent: type[Descent], step: int, line: str) -> Update | None:
    """The update in the line of a step, counted from 0. Raises ValueError."""
    try:
        return _update(header, descent, step, line)
    except (ValueError, OverflowError) as problem:
        raise ValueError(
            f"line {step + 2}, of step {step + 1}, is {line.strip()!r:.80}: {problem}"
        ) from None


def _update(header: Header, descent: type[Descent], step: int, line: str) -> Update | None:
    values = from_json(line)
    if not isinstance(values, list) or not 2 <= len(values) <= 3:
        raise ValueError("it must be a list of a rate, of gradients, and of one more list at most")
    rate, gradients, *more = values
    if gradients is None and not more:
        return None
    if not all(isinstance(numbers, list) and numbers for numbers in (gradients, *more)):
        raise ValueError("it holds an empty list, or none")
    extras = more[0] if more else []
    for value in (rate, *gradients, *extras):
        if not (isinstance(value, float | int) and math.isfinite(value)):
            raise ValueError(f"it holds {value!r:.80}, which is no finite number")
    first, second = (tuple(map(float, numbers)) for numbers in (gradients, extras))
    descent.check_extras(first, second)
    return Update(step, float(rate), first, header.weight_decay, second)


def rebuild(
    header: Header,
    updates: list[Update | None],
    initial: Adapters,
    progress: Progress = no_progress,
) -> Adapters:
    """The adapters after all updates, equal to the trained ones bit for bit.

    Raises:
        BundleError: the log does not belong to the bundle or to the initial adapters.
    """
    manifest, fields = initial.manifest, header.more
    check_belongs(header, manifest)
    if (sha256 := initial.digest()) != header.initial_sha256:
        raise BundleError(
            f"the trajectory starts from other adapters (SHA-256 {header.initial_sha256[:12]}) "
            f"than these ({sha256[:12]}); name the ones it started from with --initial"
        )
    noise = Noise.of_log(header)
    descent = descent_in(fields).of_log(fields, manifest)
    tensors = dict(initial.tensors)
    trained = trained_in(fields, tensors)
    for step, update in enumerate(updates, start=1):
        if update is not None:
            try:
                descent.remember(update)
            except ValueError as problem:
                raise BundleError(f"step {update.step} of the trajectory: {problem}") from None
            for name in trained:
                tensors |= descent.apply(noise, {name: tensors[name]})
        progress("replaying", step, len(updates))
    return Adapters(manifest, tensors)


def check_belongs(header: Header, manifest: Manifest) -> None:
    """Raise BundleError if a log is of other weights than those of the bundle."""
    if header.weights_sha256 != manifest.weights_sha256:
        raise BundleError(
            f"the trajectory was logged on other weights (SHA-256 {header.weights_sha256[:12]}), "
            f"the bundle's are {manifest.weights_sha256[:12]}"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check all fields that are not common to every log.

    Raises:
        ValueError: a field is invalid or unknown.
    """
    known = {name for owner in OWNERS for name in owner.log_fields}
    for name in fields:
        if name not in known:
            raise ValueError(
                f"it has the field {name!r:.80}, unknown to ondevice {__version__}: "
                "another version may have written it"
            )
    descents = _writers(DESCENTS, fields)
    if len(descents) > 1:
        names = [name for descent in descents for name in descent.log_fields if name in fields]
        raise ValueError(f"it has fields of several descents: {', '.join(names)}")
    for owner in _writers(OWNERS, fields):
        owner.check_fields(fields)


def descent_in(fields: Mapping[str, Any]) -> type[Descent]:
    """The descent that wrote some of the fields; plain SGD, which has none, where no other did."""
    return next(iter(_writers(DESCENTS, fields)), Sgd)


def trained_in(fields: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Those of the adapters' tensors that the estimator trained."""
    estimators = _writers(ESTIMATORS, fields)
    return [name for name in tensors if all(estimator.trains(name) for estimator in estimators)]


def _writers(owners: Iterable[T], fields: Mapping[str, Any]) -> list[T]:
    """The owners of at least one of the fields."""
    return [owner for owner in owners if not fields.keys().isdisjoint(owner.log_fields)]
