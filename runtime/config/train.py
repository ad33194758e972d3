"""The options of `ondevice train`; of `plan`, which predicts it; of `replay`, which repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runtime.config.base import (
    ALL_FILLED,
    COUNT,
    FILLED,
    NOT_NEGATIVE,
    SEED,
    Check,
    Config,
    Group,
    between,
    choice,
    option,
    output_option,
    refuse,
    required,
)
from runtime.config.methods import METHODS, Method
from runtime.config.parallel import parallel_field
from runtime.config.shared import (
    TRAIN_DATA,
    DataOptions,
    StepConfig,
    adapter_field,
    mix_field,
    valid_split_field,
)

# settings that --resume may change
CHANGEABLE = ("bundle", "device", "budget", "steps", "epochs", "patience", "parallel")
# settings that a worker gives which joins a run; it takes all others from there
OF_JOINING = ("bundle", "output", "machine", "parallel")
RANDOM_STEPS = 100  # of random rows, of which there are as many as are asked for
_USUAL_RATES = dict.fromkeys(method.learning_rate for method in METHODS.values())
_RATES = "; ".join(
    f"{rate:g} with {', '.join(name for name in METHODS if METHODS[name].learning_rate == rate)}"
    for rate in _USUAL_RATES
)
_LENGTHS = ", ".join(
    [
        *(f"{method.epochs:g} with {name}" for name, method in METHODS.items() if method.epochs),
        f"else {Method.steps:,} steps",
        f"{RANDOM_STEPS} of random rows",
    ]
)
GENERAL, NO_DATA = "general", "none"  # of --also-evaluate
RATE = between(1e-12, 1e4, f"usual are {_RATES}; larger ones leave nothing of a model")
EPSILON = between(
    1e-7, 1, "usual is 0.001, and float32 loses smaller changes than 1e-07 of values near 1"
)
LOSS = between(0, 1000, "usual are 0.1 to 5")
_EPOCHS = between(1e-6, 1e6, "usual are 1 to 10")
_DECAY = between(0, 10, "usual are 0 to 0.1")
_FACTOR = Check(
    lambda value: value == 0 or 1 < value <= 1000,
    "0, or above 1 and at most 1000",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StepConfig, DataOptions):
    """The options of `ondevice train`, which trains LoRA adapters, or all parameters."""

    data: str = required(TRAIN_DATA, "DATA")
    output: str = output_option("run", "run directory to write", "RUN")
    valid_split: str | None = valid_split_field()
    mix: str | None = mix_field()
    profile: bool = option(
        False,
        "measure where time and memory go, and write it to the run's summary.json",
        group=Group.MEMORY,
    )
    report_to: str = choice(
        "none",
        "tracker that steps and evaluations are also sent to, where it is installed",
        "none",
        "tensorboard",
        "wandb",
        group=Group.OTHER,
    )
    machine: str | None = option(
        None,
        "JSON file that `ondevice bench machine` wrote on this machine: how its heap behaves "
        "(default: as measured on Linux x86-64)",
        FILLED,
        Group.MEMORY,
        metavar="FILE",
    )
    parallel: str | None = parallel_field("data", "perturb", folder=True)
    epochs: float | None = option(
        None,
        f"how often all rows are trained on, such as 3 or 0.5 (default: {_LENGTHS})",
        _EPOCHS,
        Group.TRAINING,
    )
    steps: int | None = option(None, "optimizer steps, in place of --epochs", COUNT, Group.TRAINING)
    learning_rate: float | None = option(
        None,
        f"highest learning rate of the schedule (default: {_RATES})",
        RATE,
        Group.TRAINING,
    )
    lr_schedule: str = choice(
        "linear",
        "learning rate after the warmup: constant, or falling to 0",
        "constant",
        "linear",
        "cosine",
        group=Group.TRAINING,
    )
    warmup_steps: int = option(
        0, "steps in which the learning rate rises linearly", NOT_NEGATIVE, Group.TRAINING
    )
    weight_decay: float = option(0.0, "decoupled weight decay, as in AdamW", _DECAY, Group.TRAINING)
    seed: int = option(
        0,
        "seed of new adapters, the order of rows and the directions",
        SEED,
        Group.TRAINING,
    )
    epsilon: float = option(
        1e-3, "size of a perturbation of what is trained", EPSILON, Group.ZEROTH_ORDER
    )
    noise: str = choice(
        "auto",
        "distribution of the directions; auto: rademacher (signs) with "
        f"{', '.join(name for name, method in METHODS.items() if method.noise == 'rademacher')}, "
        "else gaussian",
        "auto",
        "gaussian",
        "rademacher",
        group=Group.ZEROTH_ORDER,
    )
    eval_data: str | None = option(
        None,
        "held-out data, as --data (default: valid of the folder in --data)",
        FILLED,
        Group.EVALUATION,
        metavar="DATA",
    )
    eval_every: int = option(
        0, "steps between evaluations; 0 for none", NOT_NEGATIVE, Group.EVALUATION
    )
    eval_rows: int = option(
        0, "rows per evaluation; 0 for all (of random:SEED one)", NOT_NEGATIVE, Group.EVALUATION
    )
    also_evaluate: tuple[str, ...] = option(
        (GENERAL,),
        "data whose loss is measured before and after training, to see what the model forgets; "
        f"give it again for more. {GENERAL} is a short text of everyday questions and sentences "
        f"that comes with ondevice (not with random rows); {NO_DATA} measures nothing",
        ALL_FILLED,
        Group.EVALUATION,
        metavar="DATA",
    )
    keep_best: bool = option(
        False,
        "keep the save with the lowest held-out loss, and make it the run's adapter at the end; "
        "needs --eval-every",
        group=Group.STOPPING,
    )
    keep: int = option(1, "how many of the latest saved states stay on disk", COUNT, Group.STOPPING)
    patience: int = option(
        0,
        "stop after so many evaluations in a row whose held-out loss is no better; 0 for never; "
        "needs --eval-every",
        NOT_NEGATIVE,
        Group.STOPPING,
    )
    min_delta: float = option(
        0.0,
        "how much lower a held-out loss must be to count as better for --patience",
        LOSS,
        Group.STOPPING,
    )
    save_every: int = option(
        50,
        "steps between saved states, from which --resume goes on; 0 to save only at the end",
        NOT_NEGATIVE,
        Group.STOPPING,
    )
    stop_seconds: float = option(
        0.0,
        "stop after this many seconds of training; 0 for no limit",
        NOT_NEGATIVE,
        Group.STOPPING,
    )
    stop_loss: float = option(
        0.0,
        "stop when the held-out loss is this low; 0 for never; needs --eval-every",
        LOSS,
        Group.STOPPING,
    )
    stop_rise: float = option(
        0.0,
        "stop when the held-out loss exceeds this many times its first value; 0 for never; needs "
        "--eval-every",
        _FACTOR,
        Group.STOPPING,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.steps is not None and self.epochs is not None:
            problems.append(
                f"epochs {self.epochs:g} and steps {self.steps} both say how long a run is: leave "
                "one out"
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            problems.append(
                f"warmup_steps {self.warmup_steps} > steps {self.steps}: the learning rate would "
                "never be reached; usual is a tenth of the steps or less"
            )
        watching = ("keep_best", "patience", "stop_loss", "stop_rise")
        unseen = [name for name in watching if getattr(self, name)]
        if unseen and not self.eval_every:
            need = f"{' and '.join(unseen)} {'needs' if len(unseen) == 1 else 'need'} eval_every"
            problems.append(f"{need}: the held-out loss is measured only then")
        if self.min_delta and not self.patience:
            problems.append("min_delta needs patience: nothing else compares with it")
        refuse(type(self), problems)

    @property
    def highest_rate(self) -> float:
        """The highest learning rate of the schedule: the method's usual one if none is given."""
        usual = METHODS[self.method].learning_rate
        return usual if self.learning_rate is None else self.learning_rate

    @property
    def other_data(self) -> tuple[str, ...]:
        """The data of `also_evaluate` that are measured, each once."""
        random = self.data.startswith("random:")  # from which no text is learnt
        unwanted = (NO_DATA, GENERAL) if random else (NO_DATA,)
        return tuple(dict.fromkeys(name for name in self.also_evaluate if name not in unwanted))

    @property
    def all_steps(self) -> int:
        """The steps of a run whose length has been settled, as `runtime.run.length` does."""
        assert self.steps is not None
        return self.steps

    @property
    def noise_kind(self) -> str:
        """The distribution of the directions, for methods that perturb."""
        return METHODS[self.method].noise if self.noise == "auto" else self.noise


@dataclass(frozen=True, kw_only=True)
class PlanConfig(StepConfig):
    """The options of `ondevice plan`, which shows how training would use a memory budget."""

    machine: str | None = option(
        None,
        "JSON file of the machine to plan for, written there by `ondevice bench machine` "
        "(default: this machine)",
        FILLED,
        Group.MEMORY,
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config):
    """The options of `ondevice replay`, which rebuilds from its log what a run has trained."""

    positional: ClassVar[str] = "run"

    run: str = required("directory of a run of a zeroth-order method, such as mezo", "RUN")
    output: str | None = output_option(
        None,
        "adapter directory to write, or with --trainable full the bundle (default: RUN/replayed)",
        "DIR",
    )
    bundle: str | None = option(
        None, "bundle of the run (default: where it was)", FILLED, metavar="BUNDLE"
    )
    initial: str | None = adapter_field(
        "adapter that the run started from (default: as the run's configuration says)"
    )
