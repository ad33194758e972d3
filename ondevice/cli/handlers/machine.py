"""Handles the commands about this machine: trust, doctor and completion."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from export.config.export import TrustConfig
from harness.config.bench import BenchConfig, DoctorConfig
from ondevice.cli.handlers.common import print_json, set_up, show
from ondevice.cli.screen import note, out
from runtime.config.base import Check, Config, option
from runtime.core.errors import OnDeviceError, UsageError

if TYPE_CHECKING:
    from harness.doctor.finding import Finding


def run_trust(config: TrustConfig, as_json: bool) -> None:
    """Let a bundle's own graphs run."""
    from ondevice.cli.describe import describe_trust
    from runtime.bundle.store import open_bundle
    from runtime.bundle.trusted import are_trusted, trust_graphs

    bundle = open_bundle(config.bundle)
    bundle.verify_small()
    manifest = bundle.manifest
    if not manifest.graphs:
        raise UsageError(f"{bundle.path} has no graphs; they are traced where it is used")
    set_up()
    from runtime.machine.backend import mlx_version

    if manifest.mlx_version != mlx_version():
        raise UsageError(
            f"the graphs of {bundle.path} were traced by MLX {manifest.mlx_version!r}, and this is "
            f"{mlx_version()}, which cannot run them; where mlx-lm is installed, ondevice traces "
            "graphs of its own"
        )
    known = are_trusted(manifest)
    if not known:
        note(describe_trust(bundle))
        if not config.yes:
            _ask("Let them run? [y/N] ")
        trust_graphs(manifest, f"trusted by ondevice trust {bundle.path}")
    facts = {"graphs": len(manifest.graphs), "trusted_before": known}
    text = f"{bundle.path}: its graphs {'could run already' if known else 'run from now on'}"
    show({"bundle": str(bundle.path), **facts}, text, as_json)


def _ask(question: str) -> None:
    """Go on only if the user says yes, at a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask at; pass --yes to answer yes")
    note(question, end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not trusted: nothing was changed")


def run_doctor(config: DoctorConfig, as_json: bool) -> None:
    """Check this machine, and measure a row of the table."""
    from harness.doctor.doctor import findings, verdict
    from harness.doctor.finding import Status

    checked: list[Finding] = []
    for finding in findings():
        checked.append(finding)
        if not as_json:
            out(finding.line())
    facts = [asdict(finding) for finding in checked]
    report: dict[str, Any] = {"verdict": verdict(checked), "findings": facts}
    if not as_json:
        out(f"\n{report['verdict']}")
    if config.bench:
        report |= _bench(checked, as_json)
    if as_json:
        print_json(report)
    broken = [finding.name for finding in checked if finding.status is Status.BROKEN]
    if broken:
        raise OnDeviceError(f"broken: {', '.join(broken)}; the lines above say what to do")


def _bench(checked: list[Finding], quiet: bool) -> dict[str, Any]:
    """Measure the row; returns it and its report for JSON."""
    from harness.bench.bench import bench, to_text
    from harness.bench.doctor import describe_duration, markdown
    from harness.doctor.doctor import products_flops

    settings = BenchConfig(name="doctor", steps=2, repeats=1, output="doctor.json")
    note(describe_duration(settings, products_flops(checked)))
    report = bench(settings, note)
    row = markdown(report)
    if not quiet:
        out(f"\n{to_text(report)}\n\nthe row to send ({settings.output} has all of it):\n")
        out(row, is_data=True)
    return {"bench": report, "row": row}


SHELLS = ("bash", "zsh", "fish", "tcsh")
# metavars of values that are no files
NOT_FILES = frozenset({"N", "X", "SIZE", "SHARE", "NAMES", "NAME", "TEXT"})


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(Config):
    """The options of `ondevice completion`, which prints a script for a shell."""

    positional: ClassVar[str] = "shell"

    shell: str = option(
        MISSING,
        "shell that completes: bash, zsh, fish or tcsh",
        Check(SHELLS.__contains__, "bash, zsh, fish or tcsh"),
        metavar=f"{{{','.join(SHELLS)}}}",
    )


def run_completion(config: CompletionConfig, as_json: bool) -> None:
    """Print a script by which a shell completes commands and options."""
    script = script_of(config.shell)
    show({"shell": config.shell, "script": script}, script, as_json, is_data=True)


def script_of(shell: str) -> str:
    """The script that shtab writes for one of SHELLS, from the parser of all commands."""
    import shtab

    from ondevice.cli.commands import COMMANDS
    from ondevice.cli.parser import whole_parser

    parser = whole_parser(*(command.name for command in COMMANDS))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # the parser's own help lists the commands elsewhere
            for command in action.choices.values():
                _set_values(command)
    script: str = shtab.complete(parser, shell)
    return script


def _set_values(command: argparse.ArgumentParser) -> None:
    """Tell shtab the values of each option by its metavar: choices, or names of files."""
    from shtab import FILE

    for action in command._actions:
        metavar = str(action.metavar)
        if action.nargs == 0:
            continue
        if metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
        elif metavar not in NOT_FILES and "," not in metavar:
            action.complete = FILE  # type: ignore[attr-defined]
