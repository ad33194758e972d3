"""What is checked of a comparison before anything runs: that every method can train like this."""

from __future__ import annotations

from harness.compare.lengths import first_passes, passes_of_step
from harness.compare.trials import grid, training_settings
from harness.config.compare import CompareConfig
from runtime.bundle.store import open_bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.run.budget import training
from runtime.run.lora import to_train


def check_methods(config: CompareConfig) -> None:
    """Check each method's options against the bundle, and the forward passes of one step.

    Raises:
        UsageError: a method cannot be trained like this, or has no step in so few passes.
        BundleError: there is no bundle, or it is damaged.
    """
    bundle = open_bundle(config.bundle)
    for method in config.method_names:
        settings = training_settings(config, grid(config, method)[0])
        trained, own = to_train(TrainConfig(**settings), bundle)
        training(trained, own.manifest)
        before = first_passes(config, method)
        passes = before + passes_of_step(config, method)
        if 0 < config.max_forward_passes < passes:
            raise UsageError(
                f"max_forward_passes {config.max_forward_passes} < {passes}, those of one step of "
                f"{method}{' and those before it' if before else ''}; give more, or leave the "
                "method out"
            )
