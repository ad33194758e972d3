"""Options of methods that see losses only: directions, and updates that follow estimates."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.base import Config, Group, between, choice, option, up_to
from runtime.config.methods import METHODS

SCALINGS, SCALED = ("parameter-norm", "gradient-norm"), ("variance", "expectation")
_SEVERAL = {name: method.queries for name, method in METHODS.items() if method.queries > 1}
MOST_QUERIES = 4096  # of a step
MOST_WINDOW, USUAL_WINDOW = 1000, 20  # estimates that momentum and Adam of MeZO average
MOST_POOL, USUAL_POOL = 1 << 30, 4096  # directions of kzoo
MOST_INTERVAL = 1 << 30  # steps between two measurements of layers' scales
USUAL_SMOOTHING = 1e-6  # of hizoo's curvature; the authors' value for LoRA


@dataclass(frozen=True, kw_only=True)
class ZerothOrderOptions(Config):
    """Options on which the memory of a zeroth-order step depends, or that only some methods have.

    Which methods have which is in `runtime.config.methods.METHODS`.
    """

    queries: int | None = option(
        None,
        "random directions per step, whose estimates are averaged (default: "
        f"{', '.join(f'{count} with {name}' for name, count in _SEVERAL.items())}, else 1)",
        up_to(MOST_QUERIES),
        Group.ZEROTH_ORDER,
    )
    zo_optimizer: str | None = choice(
        None,
        "with mezo or zo-act: follow each estimate (sgd, the default), or the averages over the "
        "latest ones, whose directions are drawn again from the log (momentum, adam)",
        "sgd",
        "momentum",
        "adam",
        group=Group.ZEROTH_ORDER,
    )
    zo_window: int | None = option(
        None,
        "with --zo-optimizer momentum or adam: how many of the latest estimates are averaged; each "
        f"is drawn again in every step, which takes time (default: {USUAL_WINDOW})",
        up_to(MOST_WINDOW),
        Group.ZEROTH_ORDER,
    )
    zo_scaling: str | None = choice(
        None,
        "with mezo: divide each layer's directions by a number of its own, the norm of its trained "
        "values, or of its gradient as forward passes estimate it; both are far from 1, so "
        "--learning-rate does not carry over",
        *SCALINGS,
        group=Group.ZEROTH_ORDER,
    )
    zo_scaled: str | None = choice(
        None,
        "with --zo-scaling: multiply the update by the same numbers, which changes the estimate's "
        "variance only (the default), or do not, which changes its expectation, so that layers "
        "learn at different rates",
        *SCALED,
        group=Group.ZEROTH_ORDER,
    )
    zo_scaling_interval: int | None = option(
        None,
        "with --zo-scaling: steps after which the norms are measured again (default: they are "
        "those of the first step)",
        up_to(MOST_INTERVAL),
        Group.ZEROTH_ORDER,
    )
    seed_pool: int | None = option(
        None,
        f"with kzoo: how many directions there are in all (default: {USUAL_POOL})",
        up_to(MOST_POOL),
        Group.ZEROTH_ORDER,
    )
    hessian_smoothing: float | None = option(
        None,
        "with hizoo: how much of its estimate of the loss's curvature each step replaces, between "
        "0 and 1; steps are shorter where the estimate is larger, and near 0 they are mezo's "
        f"(default: {USUAL_SMOOTHING:g})",
        between(1e-12, 0.99, f"usual is {USUAL_SMOOTHING:g}"),
        Group.ZEROTH_ORDER,
    )

    @property
    def zeroth_order_problems(self) -> list[str]:
        """The problems of these options together."""
        averages = self.zo_optimizer not in (None, "sgd")
        problems = []
        if self.zo_window is not None and not averages:
            problems.append("zo_window needs zo_optimizer momentum or adam: sgd averages nothing")
        if self.zo_scaling is not None and averages:
            problems.append(f"zo_scaling is for zo_optimizer sgd, not for {self.zo_optimizer}")
        if self.zo_scaling is None:
            problems += [
                f"{name} needs zo_scaling {' or '.join(SCALINGS)}: nothing is scaled"
                for name in ("zo_scaled", "zo_scaling_interval")
                if getattr(self, name) is not None
            ]
        return problems

    @property
    def zo_optimizer_name(self) -> str:
        """The name of the optimizer that follows the estimates of a zeroth-order method."""
        return self.zo_optimizer or "sgd"

    @property
    def zo_window_size(self) -> int:
        """How many estimates are averaged, where any are."""
        return USUAL_WINDOW if self.zo_window is None else self.zo_window
