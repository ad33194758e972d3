"""The commands of `ondevice`: their names, their lines of help, their options and handlers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module

from runtime.config.arguments import given
from runtime.config.base import Config, load


class CommandGroup(StrEnum):
    """The headings of `ondevice --help`, in the order in which they are shown."""

    MODEL = "make a model"
    TRAIN = "train it"
    USE = "use it"
    COMPARE = "compare and measure"
    MACHINE = "this machine"


@dataclass(frozen=True)
class Command:
    """A command: its name, its description in one line and in more, its options and its handler.

    `settings` is the full name of the class of its options. `group` says where help shows the
    command, and which module of `ondevice.cli.handlers` does the work. Both are imported when the
    command is typed, so that a training process does not load the others. `resumes` says whether
    `--resume RUN` may take the place of all options.
    """

    name: str
    summary: str
    more: str
    settings: str
    group: CommandGroup
    resumes: bool = False

    @property
    def config(self) -> type[Config]:
        """The class of its options."""
        module, _, name = self.settings.rpartition(".")
        config: type[Config] = getattr(import_module(module), name)
        return config

    def run(self, arguments: argparse.Namespace) -> None:
        """Run the command by its handler, with its options, which are in a file and in flags."""
        module = import_module(f"ondevice.cli.handlers.{self.group.name.lower()}")
        handler = getattr(module, f"run_{self.name}")
        if self.resumes:
            handler(arguments)
        else:
            config = load(self.config, arguments.config, given(arguments, self.config))
            handler(config, arguments.json)


COMMANDS = (
    Command(
        "export",
        "convert a checkpoint to a bundle: quantized weights and graphs",
        "Training, evaluation and generation start from the bundle. The checkpoint is not needed "
        "after that.",
        "export.config.export.ExportConfig",
        CommandGroup.MODEL,
    ),
    Command(
        "inspect",
        "show a bundle's model, adapters, graphs and quantization errors",
        "",
        "runtime.config.inspect.InspectConfig",
        CommandGroup.MODEL,
    ),
    Command(
        "slice",
        "cut a bundle for machines that cannot hold all of it",
        "Each slice has an equal part of every block. Training with --parallel on as many machines "
        "sends each block's other parts as it is needed.",
        "export.config.export.SliceConfig",
        CommandGroup.MODEL,
    ),
    Command(
        "plan",
        "show how training would use a memory budget, without training",
        "Takes the options of `ondevice train` on which memory depends; data are not read.",
        "runtime.config.train.PlanConfig",
        CommandGroup.TRAIN,
    ),
    Command(
        "data",
        "show the rows that training would read, and which tokens count",
        "Nothing is trained. Takes the options of `ondevice train` on which rows depend.",
        "runtime.config.inspect.DataConfig",
        CommandGroup.TRAIN,
    ),
    Command(
        "train",
        "fine-tune a model under a memory budget, or resume a run",
        "The run directory is also an adapter of mlx-lm. Stopping with Ctrl-C saves the state.",
        "runtime.config.train.TrainConfig",
        CommandGroup.TRAIN,
        resumes=True,
    ),
    Command(
        "eval",
        "measure loss, labels or exact answers on held-out data",
        "",
        "runtime.config.evaluate.EvalConfig",
        CommandGroup.USE,
    ),
    Command(
        "generate",
        "continue a prompt, with or without an adapter",
        "Takes the most likely token each time, or draws tokens at random (--temperature). The "
        "more memory the budget leaves, the faster it is.",
        "runtime.config.generate.GenerateConfig",
        CommandGroup.USE,
    ),
    Command(
        "chat",
        "hold a conversation, with or without an adapter",
        "Reads a line, answers it by the model's chat template, and reads the next. /exit or the "
        "end of the input ends it, /reset forgets it, and Ctrl-C interrupts an answer.",
        "runtime.config.generate.ChatConfig",
        CommandGroup.USE,
    ),
    Command(
        "compare",
        "compare training methods: quality against time and memory",
        "Tries learning rates, trains with each method, and writes tables, plots and an HTML page. "
        "The same command goes on where it was interrupted.",
        "harness.config.compare.CompareConfig",
        CommandGroup.COMPARE,
    ),
    Command(
        "report",
        "show one or more runs as a page of HTML",
        "The page holds losses, footprints, times and settings, and needs no network.",
        "harness.config.bench.ReportConfig",
        CommandGroup.COMPARE,
    ),
    Command(
        "replay",
        "rebuild the adapter of a zeroth-order run from its log",
        "Checks that the result is the run's own adapter, bit for bit.",
        "runtime.config.train.ReplayConfig",
        CommandGroup.TRAIN,
    ),
    Command(
        "adapter",
        "write a trained adapter for PEFT, llama.cpp or mlx-lm",
        "The bundle's model says which tensors there are, and how llama.cpp orders their rows.",
        "export.config.fuse.AdapterConfig",
        CommandGroup.USE,
    ),
    Command(
        "fuse",
        "add an adapter to the weights, for use without it",
        "Writes a checkpoint that transformers and mlx-lm load, a GGUF file for llama.cpp, or a "
        "bundle again. Without --adapter the bundle's own weights are converted.",
        "export.config.fuse.FuseConfig",
        CommandGroup.USE,
    ),
    Command(
        "trust",
        "let a bundle's own graphs run on this machine",
        "Graphs from elsewhere do not run: they are traced again from the model's configuration. "
        "This is for machines without mlx-lm, which does the tracing.",
        "export.config.export.TrustConfig",
        CommandGroup.MACHINE,
    ),
    Command(
        "bench",
        "run a benchmark on this machine; without a name, list them",
        "Every figure is measured in fresh processes.",
        "harness.config.bench.BenchConfig",
        CommandGroup.COMPARE,
    ),
    Command(
        "doctor",
        "what works on this machine, what is missing, how fast it is",
        "Each line is ok, a warning, missing (an optional part) or broken, with the way out.",
        "harness.config.bench.DoctorConfig",
        CommandGroup.MACHINE,
    ),
    Command(
        "completion",
        "print a script by which a shell completes commands and options",
        'For bash, put `eval "$(ondevice completion bash)"` into ~/.bashrc; for zsh the same with '
        "zsh into ~/.zshrc, after compinit; for fish `ondevice completion fish | source` into "
        "~/.config/fish/config.fish; for tcsh write it to a file, and source that in ~/.tcshrc.",
        "ondevice.cli.handlers.machine.CompletionConfig",
        CommandGroup.MACHINE,
    ),
)
