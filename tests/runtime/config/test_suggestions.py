"""Usage errors, and what is suggested for commands, flags and sizes that are not ours."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pages import command_parser
from support.runs import refuses

from ondevice.cli.commands import COMMANDS
from ondevice.cli.parser import long_flags
from runtime.config.base import flag as flag_of
from runtime.config.base import load
from runtime.config.elsewhere import (
    ADVICE,
    COMMANDS_ELSEWHERE,
    FLAGS_ELSEWHERE,
    VALUE_ADVICE,
    VALUES_ELSEWHERE,
)
from runtime.config.suggestions import not_known
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError

# commands and flags of other helpers' tables that some builds do not have
PARSERS = {command.name: command_parser(command) for command in COMMANDS}
OURS = {flag for parser in PARSERS.values() for flag in long_flags(parser)}
NAMES = {command.name for command in COMMANDS}
OF_TRL_AND_PEFT = """
--activation-offloading --alora-invocation-tokens --arrow-config --assistant-only-loss
--attn-implementation --bnb-4bit-quant-storage --bnb-4bit-quant-type --chat-template-path
--completion-only-loss --corda-config --dataset-config --dataset-kwargs --dataset-name
--dataset-num-proc --dataset-streaming --dataset-test-split --dataset-text-field
--dataset-train-split --ensure-weight-tying --eos-token --eva-config --eval-packing
--exclude-modules --ignore-bias-buffers --kasa-config --layer-replication --layers-pattern
--layers-to-transform --load-in-4bit --load-in-8bit --loftq-config --lora-bias --lora-ga-config
--lora-modules-to-save --lora-r --lora-target-modules --lora-target-parameters --lora-task-type
--loss-type --max-length --megatron-config --megatron-core --model-init-kwargs
--model-name-or-path --model-revision --modules-to-save --monteclora-config --packing
--packing-strategy --pad-to-multiple-of --pad-token --padding-free --qalora-group-size --r
--rank-pattern --router-aux-loss-coef --runtime-config --shuffle-dataset --target-modules
--target-parameters --trainable-token-indices --truncation-mode --use-bdlora
--use-bnb-nested-quant --use-dora --use-peft --use-qalora --use-rslora --velora-config
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("finetune b", "no command 'finetune'; did you mean train?"),
        ("Fine_Tune", "did you mean train?"),
        ("convert", "did you mean export?"),
        ("resume", "did you mean train --resume?"),
        ("gnerate", "no command 'gnerate'; did you mean generate?"),
        ("version", "did you mean --version?"),
        ("train b --iters=3", "unrecognized arguments: --iters=3; did you mean --steps?"),
        ("train b --per-device-train-batch-size 2", "did you mean --batch-size?"),
        ("train b --gradient-accumulation-steps=2", "did you mean --grad-accumulation?"),
        ("train b --lora-r 4", "did you mean --lora-rank?"),
        ("train b --num-layers 4", "did you mean --lora-layers?"),
        ("train b --learning_rate 1", "did you mean --learning-rate?"),
        ("train b --val-batches 4", "did you mean --eval-rows?"),
        ("train b --output-dir=x", "did you mean --output?"),
        ("train b --iters=3 --lr=1", "did you mean --steps or --learning-rate?"),
        ("eval b --adapter-path=x", "did you mean --adapter?"),
        ("fuse b -o x --adapter-path=x", "did you mean --adapter?"),
        ("train b --adapter-path x", "did you mean --output?"),  # where mlx_lm.lora writes them
        ("plan b --adapter-path x", "--adapter-path: `ondevice train --output RUN` writes"),
        ("inspect b --wandb", "unrecognized arguments: --wandb; see: ondevice inspect --help"),
        ("train b --resume-adapter-file x", "did you mean --adapter?"),
        ("train b --optimzer lion", "did you mean --optimizer?"),
        ("plan b --steps 3", "--steps is an option of train, compare, bench; see: ondevice plan"),
        ("train b --local-rank 1", "--local-rank: several processes share a training"),
        ("train b --dataset-config x", "--data OWNER/NAME:CONFIG:SPLIT"),
        ("generate b --prompt x --max-kv-size 512", "kept in float32, within --budget"),
        ("export m -o b --dequantize", "did you mean --bits?"),
        ("eval b --seed 3", "--seed 3; --seed is an option of export, train, generate, "),
        ("train b --num-train-epochs 3", "did you mean --epochs?"),
        ("train b --mask-prompt", "--mask-prompt: prompts have no loss unless --loss-on"),
        ("train b --load-in-4bit", "`ondevice export MODEL -o BUNDLE --bits 4`"),
        ("train --model x", "a bundle is given without a flag"),
        ("train b --use-dora", "DoRA is not supported"),
        ("train b --dora", "DoRA is not supported"),
        ("train b --fine-tune-type dora", "--fine-tune-type dora: DoRA is not supported"),
        ("train b --data=d --trainable=dora", "lora, full or prefix; DoRA is not supp"),
        ("train b --optim=adamw_torch", "did you mean --optimizer adamw?"),
        ("train b --data=d --optimizer=adamw_8bit", "adamw lies on the disk"),
        ("train b --lr-scheduler-type cosine_with_restarts", "--lr-schedule cosine?"),
        ("train b --bits 4", "--bits: weights are quantized once: `ondevice export"),
        ("train b --q-bits 4", "--q-bits: weights are quantized once"),
        ("train b --neftune-noise-alpha 5", "the plain cross entropy"),
        ("train b --val-set-size 0.1", "did you mean --valid-split?"),
        ("export m -o b --outtype q8_0", "did you mean --bits 8?"),
        ("export m -o b --bits q4_k_m", "or 32; did you mean 4?"),
        ("fuse b -o x --outtype=F16", "did you mean --dtype float16?"),
        ("fuse b -o x --outtype q8_0", "--outtype q8_0: a fused file holds floats"),
        ("fuse b -o x --upload-repo=me", "nothing is sent anywhere"),
        ("adapter r --to=gguf -o=x --outtype=f16", "adapters are written in float32"),
        ("generate b --prompt=x --kv-bits 8", "within --budget; leave it out"),
        ("generate b --prompt=x -ngl 99", "-ngl: where it computes is --device"),
        ("train b --beta 0.1", "--beta: training on pairs of a chosen and a rejected"),
        ("dpo b", "no command 'dpo': training on pairs of a chosen and a rejected answer"),
        ("serve", "no command 'serve': nothing is served over the network; `ondevice chat`"),
        ("push run", "no command 'push': nothing is sent anywhere"),
        ("generate b hello", "hello; a prompt is given by --prompt TEXT"),
        ("generate b -p hello", "did you mean --prompt?"),
        ("chat b --prompt hello", "`ondevice chat` reads what you say line by line"),
        ("generate b --repetition-penalty=1", "without penalties for repetition"),
        ("inspect b --iters", "see: ondevice inspect --help"),
        ("train b --budget 300", "did you mean 300MB?"),
        ("train b --budget 1 GB", "--budget 1 GB: a size is one word, such as --budget 1GB"),
        ("train --budget 1.5 gib b --data d", "such as --budget 1.5gib"),
        ("train --budget 300 b --data d", "did you mean 300MB?"),
        ("plan b --budget=300 MB", "--budget 300 MB: a size is one word, such as --budget 300MB"),
        ("train b --budget=1.5", "did you mean 1.5MB?"),
        ("plan b --budget=500000", "must be a size such as 300MB, 1.5GB or 512MiB"),
        ("lint", "there are export, inspect, slice, plan, data, train"),
        ("train bundle --stepz=3", "did you mean --steps?"),
        ("inspect bundle more", "unrecognized arguments: more; see: ondevice inspect --help"),
        ("train bundle --steps", "argument --steps: expected one argument; see: ondevice train"),
        ("train", "\n  BUNDLE is missing"),
        ("--", "unrecognized arguments: --; see: ondevice --help"),
        ("-x", "unrecognized arguments: -x; see: ondevice --help"),
        ("generate b --prompt x --max-tokens 0", "max_tokens is 0; it must be 1 or"),
        ("plan b --device tpu", "device is 'tpu'; it must be auto, cpu or gpu"),
        ("train --resume run --batch-size 3", "leave out --batch-size"),
        ("plan b --config nowhere.toml", "cannot read --config nowhere.toml"),
    ],
)
def test_usage_errors_say_what_to_do(words: str, said: str) -> None:
    done = refuses(2, said, *words.split())
    assert done.stdout == "" and done.stderr.startswith("ondevice: ")


def test_a_number_of_bytes_is_a_budget_as_it_was() -> None:
    config = load(TrainConfig, None, {"bundle": "b", "data": "d", "budget": "300000000"})
    assert config.budget_bytes == 300_000_000


def test_a_number_in_a_file_or_a_call_is_asked_about_too() -> None:
    said = r"budget is 300; it must be text: a size such as 300MB, .*; did you mean 300MB\?"
    with pytest.raises(UsageError, match=said):
        load(TrainConfig, None, {"bundle": "b", "data": "d", "budget": 300})
    said = (
        r"lora_targets is \['q_proj'\]; it must be text: all-linear, or names of layers such as q_"
    )
    with pytest.raises(UsageError, match=said):
        load(TrainConfig, None, {"bundle": "b", "data": "d", "lora_targets": ["q_proj"]})


def test_keys_of_files_and_calls_are_understood_too() -> None:
    given = {"bundle": "b", "data": "d", "iters": 3, "adapter_path": "a"}
    given |= {"num_epochs": 2, "lora_r": 4, "zzz": 1}
    with pytest.raises(UsageError) as problem:
        load(TrainConfig, None, given)
    said = str(problem.value)
    assert "unknown key 'iters'; did you mean steps?" in said
    assert "unknown key 'adapter_path'; did you mean output?" in said
    assert "unknown key 'lora_r'; did you mean lora_rank?" in said
    assert "unknown key 'num_epochs'; did you mean epochs?" in said
    assert said.endswith("unknown key 'zzz'")


def test_the_tables_name_what_is_not_ours() -> None:
    """Where a name of another program becomes one of ours, it leaves the table."""
    assert not set(COMMANDS_ELSEWHERE) & NAMES
    for names in FLAGS_ELSEWHERE.values():
        for *words, name in map(str.split, names):
            assert name in (long_flags(PARSERS[words[1]]) if words else OURS), name
    flags = {flag for flag in FLAGS_ELSEWHERE if flag in OURS}
    for flag in flags:  # another command may have it; then the tables help the others
        assert any(flag not in long_flags(command_parser(command)) for command in COMMANDS)
    assert not set(ADVICE) & {f"--{one.name}" for one in fields(TrainConfig)}
    for flag in set(ADVICE) & set(FLAGS_ELSEWHERE):  # for commands without any of ours
        lacking = [set(long_flags(command_parser(command))) for command in COMMANDS]
        assert any(not flags & set(FLAGS_ELSEWHERE[flag]) for flags in lacking), flag
    for flag in (*VALUES_ELSEWHERE, *VALUE_ADVICE):
        assert flag in OURS, flag
        configs = [command.config.__dataclass_fields__ for command in COMMANDS]
        checks = [
            one[flag[2:].replace("-", "_")].metadata["check"]
            for one in configs
            if flag[2:].replace("-", "_") in one
        ]
        theirs = VALUES_ELSEWHERE.get(flag, {})
        read = {value: int(value) if value.isdecimal() else value for value in theirs.values()}
        assert all(any(check.allows(read[ours]) for check in checks) for ours in theirs.values())
        others = {*theirs, *VALUE_ADVICE.get(flag, {})}
        assert not [value for value in others if all(check.allows(value) for check in checks)]


@pytest.mark.parametrize("command", sorted(NAMES))
def test_no_hint_names_a_flag_that_its_command_does_not_have(command: str) -> None:
    ours = long_flags(PARSERS[command])
    values = {
        their
        for theirs in (VALUES_ELSEWHERE, VALUE_ADVICE)
        for of in theirs.values()
        for their in of
    }
    for typed in {*FLAGS_ELSEWHERE, *ADVICE} - set(ours):
        for value in sorted(values):
            _, _, said = not_known([typed, value], ours, f"ondevice {command}").partition(" ")
            said = said.removeprefix("arguments:").replace(f" {typed} ", " ")
            for other in re.findall("`ondevice (.*?)`", said):
                name, *words = other.split()
                named = {word for word in words if word.startswith("--")}
                assert name in NAMES | {"..."} and named <= {*long_flags(PARSERS[name])}, said
            bare = re.sub(f"`[^`]*`|see: ondevice {command} --help", "", said)
            assert {*re.findall(r"(?<!\w)--[a-z-]+", bare)} <= {*ours}, (typed, value, said)


def _of_package(package: str, name: str) -> str:
    """The text of a module, which need not be imported for it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / name).read_text()


def test_flags_of_other_programs_never_become_flags_of_another_meaning() -> None:
    """However much alike their letters are: what is answered is in the tables."""
    flags_of_mlx_lm = re.compile(r'"(--[a-z][a-z-]+)"')
    same = {name: name for name in ("generate", "chat", "fuse")}
    of_commands = {"train": "lora", "export": "convert", "eval": "evaluate", **same}
    seen = 0
    for command, module in of_commands.items():
        flags = set(flags_of_mlx_lm.findall(_of_package("mlx_lm", f"{module}.py")))
        if command == "train":
            options = _of_package("transformers", "training_args.py")
            names = re.findall(r"^    (\w+): ", options, re.M)
            flags |= {flag_of(name) for name in names} | set(OF_TRL_AND_PEFT.split())
        ours = long_flags(PARSERS[command])
        for word in flags - set(ours):
            said = not_known([word], ours, f"ondevice {command}")
            meant = re.findall(r"did you mean (--[a-z-]+)", said)
            in_tables = [name.split()[-1] for name in FLAGS_ELSEWHERE.get(word, ())]
            assert not meant or meant[0] in in_tables, said
            seen += bool(meant)
    assert seen > 20
