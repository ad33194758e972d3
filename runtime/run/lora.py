"""The LoRA settings that a command works with: given, of an adapter, or the bundle's default.

The bundle is given them (`Bundle.with_lora`). From there the plan, the lowering, the adapters and
the saves read them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.adapters.lora import ALL_LAYERS, ALL_LINEAR, LoraSettings, prefix_settings
from runtime.adapters.mlx_lm import CONFIG
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.config.base import flag
from runtime.config.lora import SETTINGS, option_of
from runtime.config.shared import USUAL_PREFIX, StepConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Note, silent, warning
from runtime.methods.adapters import lora_of
from runtime.methods.base_weights import check_base_weights
from runtime.storage.saves import unfinished

C = TypeVar("C", bound=StepConfig)


def to_train(config: C, bundle: Bundle, note: Note = silent) -> tuple[C, Bundle]:
    """The configuration with all LoRA options filled in, and the bundle with these settings.

    Other options come from the adapter to start from, else from the bundle's default. Where
    that is the scale of an adapter whose folder holds no configuration, `note` is told so.

    Raises:
        BundleError: the adapter's configuration is damaged.
        UsageError: the model lacks a target or so many layers, or the adapter has other settings.
    """
    manifest = bundle.manifest
    adapter = None
    _say_unfinished(config.adapter, note)
    if config.adapter is not None and (config.trainable or manifest.trainable) != "full":
        adapter = lora_of(Path(config.adapter), manifest)
        check_base_weights(Path(config.adapter), bundle)
    config = replace(config, trainable=config.trainable or _trainable(config, adapter, manifest))
    if config.trains_prefix:
        return _with_prefix(config, bundle, adapter)
    if adapter is not None and adapter.prefix:
        raise UsageError(
            f"--trainable {config.trainable}: the adapter in {config.adapter} is a prefix; give "
            "--trainable prefix, or start with new adapters (without --adapter)"
        )
    if config.trains_all:
        return config, _without_adapters(config, bundle)
    lora = _checked(_with_given(config, adapter or manifest.lora), manifest)
    if adapter is not None:
        _check_adapter(config, manifest, adapter, lora)
    elif config.adapter is not None and config.lora_alpha is None:
        note(_without_configuration(config.adapter, lora, "--lora-alpha gives another"))
    return _filled(config, lora), bundle.with_lora(lora)


def to_resume(config: C, bundle: Bundle) -> tuple[C, Bundle]:
    """As `to_train`, for a run's own configuration: the adapter it began from may be gone."""
    resumed, bundle = to_train(replace(config, adapter=None), bundle)
    return replace(resumed, adapter=config.adapter), bundle


def _trainable(config: StepConfig, adapter: LoraSettings | None, manifest: Manifest) -> str:
    """The option --trainable where it was not given: an adapter to start from decides it too."""
    if adapter is not None and adapter.prefix:
        return "prefix"
    if config.prefix_length is not None:
        raise UsageError(
            f"--prefix-length {config.prefix_length} is an option of --trainable prefix; give both"
        )
    return manifest.trainable


def _with_prefix(config: C, bundle: Bundle, adapter: LoraSettings | None) -> tuple[C, Bundle]:
    """The configuration with the prefix's length, and the bundle with such a prefix.

    Raises:
        UsageError: the adapter to start from is none, or has another length.
    """
    rows = config.prefix_length
    if adapter is not None and not adapter.prefix:
        raise UsageError(
            f"--trainable prefix: the adapter in {config.adapter} is a LoRA adapter; give "
            "--trainable lora, or start with a new prefix (without --adapter)"
        )
    if adapter is not None and rows not in (None, adapter.prefix):
        raise UsageError(
            f"--prefix-length {rows}: the prefix in {config.adapter} has {adapter.prefix} rows; "
            "leave it out, or start with a new prefix (without --adapter)"
        )
    rows = rows or (USUAL_PREFIX if adapter is None else adapter.prefix)
    return replace(config, prefix_length=rows), bundle.with_lora(prefix_settings(rows))


def _without_adapters(config: StepConfig, bundle: Bundle) -> Bundle:
    """The bundle without adapters, whose weights themselves are trained.

    Raises:
        UsageError: its weights are quantized, or options of adapters were given.
    """
    manifest = bundle.manifest
    quantized = sorted(name for name, matrix in manifest.matrices.items() if not matrix.is_float)
    if quantized:
        raise UsageError(
            f"--trainable full: {len(quantized)} matrices of the bundle are quantized "
            f"({quantized[0]} to {manifest.matrices[quantized[0]].bits} bits), and rounding to so "
            "few would undo every update; export the model with --trainable full, or train adapters"
        )
    if flags := [*config.lora_flags, *([] if config.adapter is None else ["--adapter"])]:
        raise UsageError(
            f"{', '.join(flags)}: with --trainable full there are no adapters; leave it out, or "
            "give --trainable lora, or prefix for an adapter that is one"
        )
    return bundle.with_lora(msgspec.structs.replace(manifest.lora, targets=()))


def to_apply(adapter: Path | None, bundle: Bundle, note: Note = silent) -> Bundle:
    """The bundle with the settings of an adapter, or without any adapters.

    An adapter whose folder holds no configuration has the bundle's default. `note` is told so, and
    where a run is not finished.

    Raises:
        BundleError: the adapter's configuration is damaged.
        UsageError: it adapts an embedding in which layers look tokens up, too.
    """
    if adapter is None:
        return bundle.with_lora(msgspec.structs.replace(bundle.manifest.lora, targets=()))
    _say_unfinished(adapter, note)
    lora = lora_of(adapter, bundle.manifest)
    check_base_weights(adapter, bundle)
    if lora is None:
        lora = bundle.manifest.lora
        note(_without_configuration(str(adapter), lora))
    _refuse_borrowed(lora, bundle.manifest)
    return bundle.with_lora(lora)


def _say_unfinished(adapter: str | Path | None, note: Note) -> None:
    if adapter is not None and (text := unfinished(Path(adapter))):
        note(text)


def _without_configuration(adapter: str, lora: LoraSettings, way_out: str = "") -> str:
    """Warns that the scale of an adapter is the bundle's default."""
    return warning(
        f"{adapter}: there is no {CONFIG} that says by how much the adapter is multiplied; the "
        f"bundle's default is taken, {lora.scale:g} (alpha {lora.alpha:g}, rank {lora.rank})"
        + (f"; {way_out}" if way_out else "")
    )


def refuse_prefix(lora: LoraSettings, adapter: Path, why: str) -> None:
    """Refuse an adapter that is a prefix, where only LoRA adapters can be used.

    Raises:
        UsageError: it is one; `why` is said.
    """
    if lora.prefix:
        raise UsageError(
            f"{adapter} is a prefix of keys and values, which stays beside its bundle: {why}. Use "
            "it with ondevice eval, generate or chat --adapter, or train with --trainable lora"
        )


def _with_given(config: StepConfig, lora: LoraSettings) -> LoraSettings:
    settings = config.given_lora
    if config.lora_dropout is not None:
        settings["dropout"] = config.lora_dropout
    return msgspec.structs.replace(lora, **settings)


def _filled(config: C, lora: LoraSettings) -> C:
    """The configuration with the options that were not given; given ones stay as they are."""
    values = {option_of(name): getattr(lora, name) for name in (*SETTINGS, "dropout")}
    if lora.targets != ALL_LINEAR:
        values["lora_targets"] = ",".join(lora.targets)
    unset = {name: value for name, value in values.items() if getattr(config, name) is None}
    return replace(config, **unset)


def _checked(lora: LoraSettings, manifest: Manifest) -> LoraSettings:
    """The settings, with -1 where all of the model's layers get adapters."""
    lora.check_targets(manifest.linear_names, manifest.expert_names, manifest.outside_names)
    outside = [name for name in manifest.outside_names if lora.adapts(name, outside=True)]
    if lora.dropout and outside:
        raise UsageError(
            f"--lora-dropout {lora.dropout:g} with --lora-targets {','.join(outside)}: PEFT and "
            "mlx-lm drop other values there, or none; give --lora-dropout 0, or other targets"
        )
    _refuse_borrowed(lora, manifest)
    if not lora.targets:
        raise UsageError(
            "the bundle's default adapts no linear layer; give --lora-targets, of "
            f"{', '.join(manifest.linear_names)}"
        )
    count = len(manifest.layers)
    if lora.layers > count:
        raise UsageError(
            f"--lora-layers {lora.layers}: the model has {count} layers; give at most {count}, or "
            f"{ALL_LAYERS} for all"
        )
    return msgspec.structs.replace(lora, layers=ALL_LAYERS) if lora.layers == count else lora


def _refuse_borrowed(lora: LoraSettings, manifest: Manifest) -> None:
    """Refuse an adapter of an embedding in which layers look tokens up, too: they would miss it."""
    if names := [name for name in manifest.borrowed_names if lora.adapts(name, outside=True)]:
        raise UsageError(
            f"an adapter of {','.join(names)}: layers of this model look tokens up in this matrix "
            "as well, where adapters are not supported; train with other --lora-targets"
        )


def _check_adapter(
    config: StepConfig, manifest: Manifest, adapter: LoraSettings, lora: LoraSettings
) -> None:
    """Refuse settings that are not those of the adapter to start from, but for its dropout."""
    for name in config.given_lora:
        now, before = (_effective(settings, name, manifest) for settings in (lora, adapter))
        if now != before:
            option, setting = option_of(name), getattr(adapter, name)
            shown = setting if isinstance(setting, str | int | float) else ",".join(setting)
            typed = flag(option)
            raise UsageError(
                f"{typed} {getattr(config, option)}: the adapter in {config.adapter} has {typed} "
                f"{shown}; leave {typed} out, or start with a new adapter (without --adapter)"
            )


def _effective(lora: LoraSettings, name: str, manifest: Manifest) -> object:
    """A setting as far as it matters to this model."""
    if name == "targets":
        outside = {f"{name} outside" for name in manifest.outside_names if lora.adapts(name, True)}
        return outside | {linear for linear in manifest.linear_names if lora.adapts(linear)}
    if name == "layers":
        return lora.first_layer(len(manifest.layers))
    return getattr(lora, name)
