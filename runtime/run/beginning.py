"""What a run begins with: its adapters, and its method."""

from __future__ import annotations

from pathlib import Path

from ondevice.bundle.manifest import Manifest
from ondevice.config.train import TrainConfig
from runtime.methods.adapters import Adapters, Tensors
from runtime.methods.mebp import MeBP
from runtime.methods.mezo import MeZO
from runtime.methods.noise import Noise
from runtime.methods.optimizer import Optimizer
from runtime.methods.protocol import Method
from runtime.run.open import Session
from runtime.storage.activations import Activations


def initial_adapters(manifest: Manifest, seed: int, adapter: str | None, into: Tensors) -> Adapters:
    """What training starts from: the adapters in a file or run, or new ones."""
    if adapter is None:
        return Adapters.initial(manifest, seed, into)
    return Adapters.load(manifest, Path(adapter), into)


def method_of(config: TrainConfig, session: Session, adapters: Adapters, scratch: Path) -> Method:
    """The method that is configured, at its beginning, with its scratch files in `scratch`."""
    plan = session.plan
    blocks = len(session.bundle.manifest.blocks)
    shape = (1, plan.bucket, session.bundle.manifest.hidden_size)
    if config.method == "mezo":
        count = 2 * config.queries * config.batch_size * config.grad_accumulation
        return MeZO(
            session.program,
            adapters,
            Activations(scratch, 1, count, shape),
            Noise(config.seed, config.noise),
            config.epsilon,
            config.queries,
            config.weight_decay,
            plan.lanes,
        )
    return MeBP(
        session.program,
        adapters,
        Activations(scratch, blocks, config.batch_size, shape),
        Optimizer(adapters, config.optimizer, config.weight_decay, scratch),
        plan.lanes,
        plan.kept_layers,
    )
