"""The log from which a zeroth-order run can be rebuilt: a few bytes a step.

`trajectory.jsonl` begins with a header (seed, noise, weight decay, LoRA settings, what it starts
from); then one line a step: `[rate, [what the direction of each query is multiplied by]]`, in MeZO
the projected gradients, or `[rate, null]` for a step that was skipped because a loss was not
finite. Where the Hessian is estimated, the second differences along the same directions follow:
`[rate, [...], [...]]`. Where layers have scales, these follow in the steps that measured them.
Floats are written so that they read back to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.adapters.lora import LoraSettings
from runtime.bundle.manifest import Manifest
from runtime.config.shared import ROUNDINGS, STORED
from runtime.config.zeroth_order import (
    MOST_POOL,
    MOST_WINDOW,
    SCALED,
    SCALINGS,
)
from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_file
from runtime.methods.adapters import Adapters
from runtime.methods.noise import KINDS, Noise
from runtime.methods.zeroth.descent import AVERAGING, OPTIMIZERS, Descent, Sgd, descent_of
from runtime.methods.zeroth.hessian import HessianDescent
from runtime.methods.zeroth.layer_scales import ScaledDescent, is_scale
from runtime.methods.zeroth.scalar_update import Update

FORMAT = "ondevice-trajectory-1"
# fields of the header that logs of plain MeZO lack
OPTIONAL = (
    *("optimizer", "window", "pool", "trained", "rounding"),
    *("hessian_smoothing", "scaling", "scaled", "frozen"),
)


def digest(adapters: Adapters) -> str:
    """SHA-256 over the adapters' names and float32 values, in program order."""
    found = hashlib.sha256()
    for name in Adapters.shapes(adapters.manifest):
        found.update(name.encode())
        found.update(np.array(adapters.tensors[name], copy=False).tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Header:
    """The header of a log: which run it belongs to, and how its noise is drawn.

    `lora` are the fields of `LoraSettings`; empty in logs of an early version, whose runs used the
    bundle's default. The fields after `format` are written only where they differ from their
    defaults, which are MeZO's. `optimizer` and `window` are those of `runtime.methods.zeroth.descent`,
    and `pool` is that of `Noise`. `hessian_smoothing` is above 0 where the descent is that of
    `runtime.methods.zeroth.hessian`, and `scaling` is no empty text where it is that of
    `runtime.methods.zeroth.layer_scales`.
    `frozen` ends the names of tensors that are not trained, where it is no empty text.
    `trained` is "lora" or "full"; with "full" the noise is that of `runtime.methods.full.row_noise`,
    both checksums are those of the bundle's weights, and updated weights are rounded as `rounding`
    says.
    """

    seed: int
    noise: str
    weight_decay: float
    weights_sha256: str
    initial_sha256: str
    lora: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    optimizer: str = Sgd.optimizer
    window: int = 0
    pool: int = 0
    trained: str = "lora"
    rounding: str = "nearest"
    hessian_smoothing: float = 0.0
    scaling: str = ""
    scaled: str = ""
    frozen: str = ""

    def check(self) -> None:
        """Raise ValueError for an invalid field, since anybody may have written the file."""
        if self.format != FORMAT:
            raise ValueError(f"its format is {self.format!r}, not {FORMAT!r}")
        if self.noise not in KINDS:
            raise ValueError(f"its noise is {self.noise!r}; it must be one of {', '.join(KINDS)}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"its seed is {self.seed!r}")
        decay = self.weight_decay
        if type(decay) not in (int, float) or not 0 <= decay < math.inf:
            raise ValueError(f"its weight decay is {decay!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"its optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}"
            )
        fewest = 1 if self.optimizer in AVERAGING else 0
        most = MOST_WINDOW if self.optimizer in AVERAGING else 0
        if type(self.window) is not int or not fewest <= self.window <= most:
            raise ValueError(f"its window is {self.window!r}, with {self.optimizer}")
        if type(self.pool) is not int or not 0 <= self.pool <= MOST_POOL:
            raise ValueError(f"its pool of directions is {self.pool!r}")
        if not all(isinstance(sha, str) for sha in (self.weights_sha256, self.initial_sha256)):
            raise ValueError("its checksums are not text")
        if self.trained not in STORED:
            raise ValueError(f"what it trains is {self.trained!r}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"its rounding is {self.rounding!r}")
        smoothing = self.hessian_smoothing
        if type(smoothing) not in (int, float) or not 0 <= smoothing < 1:
            raise ValueError(f"its smoothing of the Hessian is {smoothing!r}")
        if smoothing and (self.optimizer != Sgd.optimizer or self.trained != "lora"):
            raise ValueError(f"it smooths a Hessian with {self.optimizer} of {self.trained}")
        if (self.scaling, self.scaled) not in (("", ""), *product(SCALINGS, SCALED)):
            raise ValueError(f"its layers have scales of {self.scaling!r} for {self.scaled!r}")
        plain = (self.optimizer, self.trained, smoothing) == (Sgd.optimizer, "lora", 0)
        if self.scaling and not plain:
            raise ValueError(f"its layers have scales with {self.optimizer} of {self.trained}")
        if self.frozen not in ("", "lora_a") or (self.frozen and self.trained != "lora"):
            raise ValueError(f"of {self.trained} it does not train {self.frozen!r}")
        if self.settings is not None and (problem := self.settings.problem):
            raise ValueError(f"its LoRA {problem}")

    @property
    def settings(self) -> LoraSettings | None:
        """The LoRA settings, None if the log has none. Raises ValueError if they are invalid."""
        try:
            return msgspec.convert(self.lora, LoraSettings) if self.lora else None
        except msgspec.ValidationError as problem:
            raise ValueError(f"its LoRA settings: {problem}") from None

    def line(self) -> str:
        facts = asdict(self)
        for one in fields(self):
            if one.name in OPTIONAL and facts[one.name] == one.default:
                del facts[one.name]
        return json.dumps(facts) + "\n"


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
        header = Header(**facts)
        header.check()
        return header, list(_updates(header, lines[1:]))
    except (OSError, ValueError, TypeError, IndexError, OverflowError) as problem:
        raise BundleError(f"{path} is not a trajectory that can be replayed: {problem}") from None


def _updates(header: Header, lines: list[str]) -> Iterator[Update | None]:
    scaled = False
    for step, line in enumerate(lines):
        rate, gradients, *more = from_json(line)
        if gradients is None and not more:
            yield None
            continue
        curvatures: list[Any] = []
        if header.hessian_smoothing:
            (curvatures,) = more
            if len(curvatures) != len(gradients):
                raise ValueError(f"line {step + 2} holds no second difference for each gradient")
        scales: list[Any] = []
        if header.scaling and more:
            (scales,) = more
            if not scales or not all(isinstance(v, float | int) and is_scale(v) for v in scales):
                raise ValueError(f"line {step + 2} holds a scale that is no number above 0")
        elif more and not header.hessian_smoothing:
            raise ValueError(f"line {step + 2} holds more than projected gradients")
        scaled = scaled or bool(scales)
        if header.scaling and not scaled:
            raise ValueError(f"line {step + 2} comes before any scales of the layers")
        values: list[Any] = [rate, *gradients, *curvatures]
        if not gradients or not all(
            isinstance(v, float | int) and math.isfinite(v) for v in values
        ):
            raise ValueError(f"line {step + 2} holds no finite projected gradients")
        first, second, third = (tuple(map(float, one)) for one in (gradients, curvatures, scales))
        yield Update(step, float(rate), first, header.weight_decay, second, third)


def rebuild(header: Header, updates: list[Update | None], initial: Adapters) -> Adapters:
    """The adapters after all updates, equal to the trained ones bit for bit.

    Raises:
        BundleError: the log does not belong to the bundle or to the initial adapters.
    """
    manifest = initial.manifest
    check_belongs(header, manifest)
    if (found := digest(initial)) != header.initial_sha256:
        raise BundleError(
            f"the trajectory starts from other adapters (SHA-256 {header.initial_sha256[:12]}) "
            f"than these ({found[:12]}); name the ones it started from with --initial"
        )
    noise = Noise(header.seed, header.noise, header.pool)
    tensors = dict(initial.tensors)
    trained = [name for name in tensors if not (header.frozen and name.endswith(header.frozen))]
    descent = _descent(header, manifest)
    for update in updates:
        if update is not None:
            try:
                descent.remember(update)
            except ValueError as problem:
                raise BundleError(f"the trajectory does not fit the bundle: {problem}") from None
            for name in trained:
                tensors[name] = descent.apply(noise, name, tensors[name])
    return Adapters(manifest, tensors)


def _descent(header: Header, manifest: Manifest) -> Descent:
    """What follows the estimates of a log."""
    shapes = Adapters.shapes(manifest)
    if header.hessian_smoothing:
        return HessianDescent(header.hessian_smoothing, shapes, {})
    if header.scaling:
        return ScaledDescent(header.scaling, header.scaled, 0, manifest)
    return descent_of(header.optimizer, header.window)


def check_belongs(header: Header, manifest: Manifest) -> None:
    """Raise BundleError if a log is of other weights than those of the bundle."""
    if header.weights_sha256 != manifest.weights_sha256:
        raise BundleError(
            f"the trajectory was logged on other weights (SHA-256 {header.weights_sha256[:12]}), "
            f"the bundle's are {manifest.weights_sha256[:12]}"
        )
