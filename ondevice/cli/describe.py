"""Bundles, plans and summaries as text for people, and as facts for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.arrays.attention_scratch import BLOCK
from runtime.bundle.manifest import Manifest, Quality
from runtime.bundle.store import Bundle
from runtime.bundle.trusted import are_trusted
from runtime.core.control_characters import escaped
from runtime.core.units import counted, format_bytes, format_number

if TYPE_CHECKING:
    from runtime.run.results import Evaluation, EvaluationResult, Generation, TrainResult

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"  # as terminals understand it
MARKS = ("\u27e6", "\u27e7")  # around scored text, where there are no colours


def printable(value: object) -> str:
    """A value of a document from elsewhere, without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def facts_of(bundle: Bundle) -> dict[str, Any]:
    """The facts of a bundle, as `ondevice inspect --json` prints them."""
    m = bundle.manifest
    return {
        "bundle": str(bundle.path),
        "family": m.family,
        "mlx_version": m.mlx_version,
        "device": m.device,
        "hidden_size": m.hidden_size,
        "vocab_size": m.vocab_size,
        "lora": msgspec.to_builtins(m.lora),
        "trainable": m.trainable,
        "buckets": list(m.buckets),
        "weights_bytes": m.weights_nbytes,
        "weights_sha256": m.weights_sha256,
        "slice": msgspec.to_builtins(m.slice),
        "graphs": len(m.graphs),
        "graphs_bytes": _graphs_bytes(m),
        "graphs_trusted": are_trusted(m),
        "blocks": [
            {"name": b.label, "block_type": b.type, "adapted": list(m.adapted(b))} for b in m.blocks
        ],
        "matrices": {
            name: {
                "rows": x.rows,
                "columns": x.columns,
                "bits": x.bits,
                "group_size": x.group_size,
                "layout": x.layout,
                "dtype": x.packed.dtype,
                "nbytes": x.nbytes,
                "error": x.error,
            }
            for name, x in m.matrices.items()
        },
        "bits_per_weight": m.bits_per_weight,
        "quality": msgspec.to_builtins(m.quality),
        "files": sorted(m.files),
        "provenance": m.provenance,
    }


def describe_bundle(bundle: Bundle) -> str:
    """A bundle but for its matrices, as `ondevice inspect` prints it."""
    m = bundle.manifest
    parameters = sum(x.rows * x.columns for x in m.matrices.values())
    trainable = sum(
        (m.matrices[b.tensor(n)].rows + m.matrices[b.tensor(n)].columns) * m.lora.rank
        for b in m.layers
        for n in m.adapted(b)
    )
    lines = [
        f"{bundle.path}: {m.family}, {parameters / 1e6:.1f}M parameters in "
        f"{format_bytes(m.weights_nbytes)}, {len(m.layers)} layers of width {m.hidden_size}, "
        f"vocabulary {m.vocab_size}",
        *([f"{m.slice}, {format_bytes(m.held_nbytes)} of these"] if m.slice else []),
        *(["trains all parameters by default"] if m.trainable == "full" else []),
        f"LoRA by default: {m.lora.describe()}: {trainable / 1e6:.2f}M trainable",
        f"sequence lengths: {', '.join(map(str, m.buckets))}",
        f"graphs: {_graphs(m)}",
        f"tokenizer: {', '.join(name.split('/')[-1] for name in m.files) or 'none'}",
        f"from: {printable(m.provenance.get('name', '?'))} "
        f"({printable(m.provenance.get('kind', '?'))})",
        f"quality: {_quality(m)}",
        *(f"warning: {printable(text)}" for text in m.warnings),
        "",
    ]
    for name, block_type in m.block_types.items():
        members = [b.label for b in m.blocks if b.type == name]
        shown = members[0] if len(members) == 1 else f"{members[0]} and {len(members) - 1} more"
        operations = (f"  {each.describe(block_type.values)}" for each in block_type.operations)
        lines += [f"{name} ({shown}):", *operations, ""]
    return "\n".join(lines)


def describe_matrices(bundle: Bundle) -> str:
    """A table of a bundle's matrices."""
    rows = [("matrix", "shape", "bits", "group", "bytes", "error")]
    rows += [
        (
            name,
            f"{x.rows}x{x.columns}",
            x.packed.dtype if x.is_float else str(x.bits),
            "-" if x.is_float else str(x.group_size),
            format_bytes(x.nbytes),
            f"{x.error['relative_rms']:.4f}" if x.error else "as given",
        )
        for name, x in bundle.manifest.matrices.items()
    ]
    return _table(rows)


def _graphs(manifest: Manifest) -> str:
    """The number of graphs, their tracer, and whether they run as they lie."""
    if not manifest.graphs:
        return "none; they are traced when the bundle is first used"
    known = are_trusted(manifest)
    fate = (
        "exported or trusted by you"
        if known
        else "from elsewhere, so they do not run: others are traced when the bundle is first used"
    )
    return (
        f"{len(manifest.graphs)} in {format_bytes(_graphs_bytes(manifest))}, traced for "
        f"{manifest.device} by MLX {manifest.mlx_version}; {fate}"
    )


def _graphs_bytes(manifest: Manifest) -> int:
    return sum(graph.nbytes for graph in manifest.graphs.values())


def describe_trust(bundle: Bundle) -> str:
    """The risk of letting a bundle's own graphs run."""
    m = bundle.manifest
    return (
        f"{bundle.path} has {len(m.graphs)} graphs ({format_bytes(_graphs_bytes(m))}), traced for "
        f"{m.device} by MLX {m.mlx_version}. No export of yours wrote them.\n"
        "Graphs are code, and MLX runs them unchecked: a malicious graph can crash this process, "
        "or read and change its memory.\n"
        "Let them run only if you trust whoever made this bundle, and got it as they made it. "
        "Where mlx-lm is installed this is not needed: ondevice then traces graphs of its own."
    )


def _quality(manifest: Manifest) -> str:
    """Bits per weight, their calibration, and the loss of quality."""
    calibration = manifest.provenance.get("calibration")
    calibrated = ""
    if isinstance(calibration, dict):
        tokens, data = calibration.get("tokens"), calibration.get("data")
        calibrated = f", calibrated on {printable(tokens)} tokens of {printable(data)}"
    quality = manifest.quality
    lost = "not measured" if quality is None else quality.describe()
    warning = "" if quality is None or not quality.is_hurt else f"\nwarning: {quality.warning()}"
    return f"{manifest.bits_per_weight:.2f} bits per weight{calibrated}; {lost}{warning}"


def describe_fit(plan: dict[str, Any]) -> str:
    """One sentence on a plan: that it fits, its peak, and the smallest budget."""
    return (
        f"fits the budget of {format_bytes(plan['budget_bytes'])}: the expected peak is "
        f"{format_bytes(plan['predicted_peak_bytes'])}, {_free()} of a budget stays free, and the "
        f"smallest budget that fits is {_smallest(plan)}"
    )


def _free() -> str:
    """The share of a budget that no predicted peak may take."""
    from runtime.plan.planner import MARGIN

    return f"{1 - MARGIN:.0%}"


def _smallest(plan: dict[str, Any]) -> str:
    """The smallest budget that fits, of which the plan's own can be one."""
    return format_bytes(min(plan["minimum_bytes"], plan["budget_bytes"]), up=True)


def describe_plan(plan: dict[str, Any], per_block: bool = False) -> str:
    """A plan as text, for `ondevice plan`; without the blocks for `ondevice train --verbose`."""
    kept = "dequantized" if plan["arithmetic"] == "unpacked" else "in memory"
    of_mlps = f", inside MLPs {plan['kept_products']}" if plan["kept_products"] else ""
    rows = [
        ("process and its libraries", plan["process_bytes"]),
        ("adapters of the current block", plan["adapter_bytes"]),
        ("gradients", plan["gradient_bytes"]),
        *(
            [("updates of a tile of weights", plan["weight_update_bytes"])]
            if plan["weight_update_bytes"]
            else []
        ),
        ("values of the largest block", plan["live_bytes"]),
        ("free memory that the allocator keeps", plan["slack_bytes"] + plan["cache_bytes"]),
        (
            f"activations not recomputed: {counted(plan['kept_layers'], 'layer')}{of_mlps}",
            plan["kept_bytes"],
        ),
        (
            f"weights that stay {kept}: {counted(plan['materialized_layers'], 'layer')}",
            plan["materialized_bytes"],
        ),
        ("predicted peak", plan["predicted_peak_bytes"]),
        ("budget", plan["budget_bytes"]),
    ]
    if plan["limit_bytes"] is not None:
        rows.append(("memory limit of this process (container)", plan["limit_bytes"]))
    table = [(part, format_bytes(size)) for part, size in rows]
    table += [
        (f"smallest budget that fits, with {_free()} free", _smallest(plan)),
        ("scratch files on disk", format_bytes(plan["scratch_disk_bytes"])),
    ]
    lines = [
        f"sequence bucket of {plan['bucket']} tokens, "
        f"{counted(plan['rows'], 'sequence')} per batch, "
        f"{counted(plan['accumulation'], 'batch', 'batches')} per step",
        f"tiles: {_tiles(plan)}",
        f"products in {plan['compute_dtype']}{_dequantizing(plan)}",
        _table(table),
    ]
    if per_block:
        blocks = [("block", "forward", "backward")]
        blocks += [
            (b["name"], format_bytes(b["forward_bytes"]), format_bytes(b["backward_bytes"]))
            for b in plan["blocks"]
        ]
        lines += ["", _table(blocks)]
    return "\n".join(lines)


def _dequantizing(plan: dict[str, Any]) -> str:
    """How weights become factors of products, where they are not multiplied as they are."""
    if plan["arithmetic"] == "packed":
        return ""
    return ", by compiled code" if plan["compiled"] else ", weights dequantized by NumPy and MLX"


def _tiles(plan: dict[str, Any]) -> str:
    """The tile sizes of a plan in words."""
    bucket = plan["bucket"]
    weights = f"{plan['tile_values']} weights in {plan['compute_dtype']}"
    if plan["arithmetic"] == "packed":
        weights = "quantized weights multiplied as they are"
    elif plan["compiled"]:
        weights = "quantized weights multiplied where they lie"
    tiled = plan["compiled"] and not plan["context"]  # attention is compiled
    queries, width = BLOCK if tiled else plan["query_block"], plan["slice_columns"]
    return ", ".join(
        (
            weights,
            "all queries" if queries >= bucket else f"{queries} queries of attention",
            f"{width} columns of an MLP's width" if width else "an MLP's whole width",
            f"{plan['chunk_rows']} rows of the vocabulary",
            *(
                []
                if plan["evaluation"] == "part"
                else [f"each {plan['evaluation']} evaluated once"]
            ),
        )
    )


def describe_lengths(recommended: Sequence[int], longest: int, buckets: Sequence[int]) -> str:
    """The lengths to export for, beside the longest row, in tokens, and the bundle's buckets."""
    if not recommended:
        return "there is no row to recommend lengths for"
    fit = "all rows fit this bundle" if longest <= buckets[-1] else "this bundle cuts the longest"
    return (
        f"the longest row has {longest} tokens to predict: {fit}, whose lengths are "
        f"{', '.join(map(str, buckets))}; lengths that hold half, nine tenths and all of the rows: "
        f"--seq-lens {','.join(map(str, recommended))}"
    )


def marked(pieces: Sequence[tuple[str, bool]], colours: bool) -> tuple[str, str]:
    """A row's pieces as one text in which the scored ones stand out, and how they are marked.

    Among colours their control characters are escaped, so that no row can look as if it were scored
    otherwise.
    """
    before, after = (GREEN, PLAIN) if colours else MARKS
    pieces = [(escaped(piece), scored) if colours else (piece, scored) for piece, scored in pieces]
    text = "".join(f"{before}{piece}{after}" if scored else piece for piece, scored in pieces)
    return text, f"{GREEN}green{PLAIN}" if colours else f"between {before} and {after}"


def describe_evaluation(result: Evaluation) -> str:
    """Loss, perplexity and accuracy of held-out rows, in one line."""
    if result.loss is None:
        bad = counted(result.rows_not_finite, "row")
        loss = f"no finite loss ({bad} of {result.rows} without)"
    else:
        loss = f"loss {result.loss:.4f}, perplexity {result.perplexity:.2f}"
    return (
        f"{loss}, next-token accuracy {result.accuracy:.2%}, rows exactly right {result.exact:.1%}"
    )


def describe_task(result: EvaluationResult) -> str:
    """The result of `ondevice eval` on rows, with the figure of its task first."""
    loss = describe_evaluation(result)
    if result.task == "exact":
        right = round(result.exact * result.rows)
        return f"rows exactly right {result.exact:.2%} ({right} of {result.rows})\n{loss}"
    if result.task != "labels":
        return loss
    lines = [f"labels right {result.label_accuracy:.2%} (of rows); for each label:"]
    lines += [
        f"  {label.text!r}: right for {label.share:.1%} of rows, answered in {label.answered:.1%}"
        for label in result.labels
    ]
    return "\n".join([*lines, loss])


def describe_fusing(quality: Quality, adapted: bool) -> str:
    """The cost of fusing, in one sentence."""
    before = "with the adapter" if adapted else "of the bundle"
    return (
        f"loss {quality.source_loss:.4f} {before}, {quality.loss:.4f} fused; KL divergence between "
        f"them {max(0.0, quality.divergence):.2g} nats per token, on {quality.tokens} tokens of "
        f"{printable(quality.text)}"
    )


def describe_summary(summary: TrainResult) -> str:
    """The last lines that `ondevice train` prints."""
    from runtime.run.results import FINAL_STEPS

    final = summary.final_train_loss
    last = min(FINAL_STEPS, summary.steps - summary.skipped_steps)
    mean = f" (mean of {last} steps)" if last > 1 else ""
    loss = "" if final is None else f", final training loss {final:.4f}{mean}"
    epochs = ""
    if summary.epochs is not None:  # how often all rows were trained on
        epochs = f" ({format_number(summary.epochs)} epoch{'' if summary.epochs == 1 else 's'})"
    speed = "no step was needed"
    if summary.steps:
        speed = (
            f"{summary.step_s_median:.2f} s a step (median), {summary.tokens_per_s:.0f} tokens/s "
            f"({summary.scored_tokens_per_s:.0f} of them scored)"
        )
    lines = [
        f"{summary.method}: {counted(summary.steps, 'step')}{epochs}, {speed}{loss}",
        f"peak footprint {format_bytes(summary.peak_footprint_bytes)} (predicted "
        f"{format_bytes(summary.predicted_peak_bytes)}, budget "
        f"{format_bytes(summary.budget_bytes)}; with file pages at most "
        f"{format_bytes(summary.peak_rss_bytes)})",
    ]
    if summary.sent_bytes_per_step is not None:
        lines.append(f"each process sent {format_bytes(summary.sent_bytes_per_step)} a step")
    for when, result in summary.evaluations.items():
        lines.append(describe_validation(when, result))
    lines += _describe_others(summary.others)
    if summary.stopped == "patience":
        since = counted(summary.evaluations_no_better, "evaluation")
        lines.append(f"stopped early: {since} in a row had no better held-out loss")
    if summary.best is not None:
        lines.append(
            f"the run's adapter is that after step {summary.best.step}, whose held-out loss of "
            f"{summary.best.loss:.4f} is the lowest"
        )
    return "\n".join(lines)


def _describe_others(others: Mapping[str, Mapping[str, Evaluation]]) -> list[str]:
    """The losses on other data before and after, and which of them the model is worse at."""
    from runtime.run.results import is_forgotten, loss_of

    lines, worse = [], []
    for data, evaluations in others.items():
        if not {"before", "after"} <= set(evaluations):
            continue
        before, after = loss_of(evaluations["before"]), loss_of(evaluations["after"])
        name = printable(Path(data).name)
        lines.append(f"{name}: loss {before:.4f} before training, {after:.4f} after it")
        if is_forgotten(before, after):
            worse.append(name)
    if worse:
        lines.append(
            f"the model became worse at {', '.join(worse)}: fewer epochs, a lower --learning-rate "
            "or --mix DATA:10% forget less"
        )
    return lines


def describe_validation(when: str, result: Evaluation) -> str:
    """An evaluation, "before" or "after" training or after a number of steps, in one line."""
    known = {"before": "before training", "after": "after training"}
    return f"{known.get(when, f'after step {when}')}: {describe_evaluation(result)}"


def describe_generation(done: Generation) -> str:
    """The speed of a continuation, and its memory."""
    speeds = [
        f"{counted(done.prompt_tokens, 'token')} of prompt" + _speed(done.prompt_tokens_per_s),
        f"{counted(done.generated_tokens, 'token')} generated" + _speed(done.tokens_per_s),
    ]
    return (
        f"{'; '.join(speeds)}; peak footprint {format_bytes(done.peak_footprint_bytes)}, "
        f"budget {format_bytes(done.budget_bytes)}"
    )


def _speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f", {format_number(tokens_per_s)} tokens/s"
