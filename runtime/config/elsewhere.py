"""Commands and flags of mlx-lm, PEFT, TRL, transformers and llama.cpp, and their names here."""

from __future__ import annotations

_COMMANDS = {  # ours: those of other tools
    "train": "finetune fine-tune lora sft tune fit",
    "train --resume": "resume",
    "export": "convert quantize import",
    "eval": "evaluate test perplexity validate",
    "generate": "infer predict complete run",
    "fuse": "merge",
    "bench": "benchmark",
    "inspect": "show info",
    "data": "dataset",
    "doctor": "check env diagnose",
    "completion": "completions",
    "--help": "help",
    "--version": "version",
}
_FLAGS = {  # the same for flags: of two meanings, the first that a command has counts
    "--adapter": (
        "--adapter-path --adapter-file --adapters --lora --peft-model --resume-adapter-file"
    ),
    "--resume": "--resume-from-checkpoint",
    "--steps": "--iters --max-steps --max-iters --num-steps",
    "--epochs": "--num-train-epochs --num-epochs",
    "--learning-rate": "--lr",
    "--lr-schedule": "--lr-scheduler-type --lr-scheduler --scheduler",
    "--warmup-steps": "--warmup",
    "--batch-size": "--per-device-train-batch-size --train-batch-size --micro-batch-size",
    "--grad-accumulation": (
        "--gradient-accumulation-steps --grad-accumulation-steps --accumulate-grad-batches"
    ),
    "--optimizer": "--optim",
    "--max-grad-norm": "--max-gradient-norm --gradient-clipping",
    "--lora-rank": "--lora-r --rank",
    "--lora-alpha": "--alpha",
    "--lora-targets": "--target-modules --lora-target-modules --lora-keys",
    "--lora-layers": "--num-layers --lora-num-layers",
    "--rslora": "--use-rslora",
    "--lora-dropout": "--dropout",
    "--trainable": "--fine-tune-type --prefix-tuning",
    "--prefix-length": "--num-prefix --num-virtual-tokens",
    "--queries": "--num-perturbations",
    "--epsilon": "--zo-eps",
    "--max-seq-length": "--max-length --max-seq-len --block-size --cutoff-len --ctx-size",
    "--max-tokens": "--max-length --max-new-tokens --n-predict -n",
    "--pack": "--packing",
    "--data": "--train-file --train-data --dataset --dataset-name",
    "--eval-data": "--validation-file --valid-data",
    "--eval-every": "--eval-steps --steps-per-eval",
    "--eval-rows": "--val-batches --test-batches --max-eval-samples",
    "--save-every": "--save-steps",
    "--keep": "--save-total-limit",
    "--keep-best": "--load-best-model-at-end",
    "--patience": "--early-stopping-patience",
    "--output": "--output-dir --mlx-path --save-path --outfile",
    "--columns": "--dataset-text-field --prompt-feature --text-feature",
    "--loss-on": "--assistant-only-loss --completion-only-loss --train-on-inputs",
    "--bits": "--q-bits --outtype",
    "--group-size": "--q-group-size",
    "--temperature": "--temp",
    "--prompt": "-p",
    "--context": "-c",
    "--config": "-c",
    "--system": "--system-prompt",
    "--budget": "--memory --max-memory --memory-limit",
}

COMMANDS_ELSEWHERE = {theirs: ours for ours, names in _COMMANDS.items() for theirs in names.split()}
"""Our command for each of another tool."""
FLAGS_ELSEWHERE = {
    theirs: tuple(ours for ours, names in _FLAGS.items() if theirs in names.split())
    for theirs in " ".join(_FLAGS.values()).split()
}
"""Our flags for each of another tool: the first that a command has is meant."""

_BUNDLE = (
    "a bundle is given without a flag, behind the command; a checkpoint becomes one by: "
    "ondevice export MODEL -o BUNDLE"
)
_QUANTIZED = "weights are quantized once: ondevice export MODEL -o BUNDLE --bits 4 (or 8, 16)"
_MEMORY = "activations are recomputed where the budget asks for it (--budget); leave it out"
_PRECISION = (
    "weights are computed with in float32, whatever the bundle stores; leave it out, or store "
    "adapters of the current block in --adapter-dtype bfloat16"
)
_ONE_DEVICE = "training uses one process on one device; leave it out"
_LINES = "every ten steps a line is printed, and all are in the run's metrics.jsonl; leave it out"
_DORA = (
    "DoRA is not supported: it divides every output by the norm of a row of the merged weight "
    "W + s BA, which takes another pass over the dequantized weights after each update, and trains "
    "one more tensor for each matrix; no operation of a bundle does this. Use LoRA, with --rslora "
    "where the rank is high"
)
_PENALTY = (
    "tokens are drawn without penalties for repetition; --temperature, --top-k, --top-p and "
    "--min-p say how evenly"
)

_NO_RELIEF = "it was removed: no heap memory is given back near the predicted peak; leave it out"
_NO_METHOD = "its method was removed; ondevice train --help lists the methods that there are"

_NO_PAIRS = (
    "training on pairs of a chosen and a rejected answer (DPO and the like) is not supported; "
    "`ondevice train` learns from the chosen answers alone, as prompt and completion"
)

COMMAND_ADVICE = {
    **dict.fromkeys(("dpo", "orpo", "kto", "grpo", "ppo", "rlhf"), _NO_PAIRS),
    "serve": "nothing is served over the network; `ondevice chat` answers line by line, and "
    "`ondevice fuse --format gguf` writes a file for servers such as llama-server",
    "push": "nothing is sent anywhere; the run's folder can be uploaded",
}
"""Commands of other tools that have no counterpart, and the way to the same end."""

ADVICE = {  # flags with no counterpart: the way to the same end
    **dict.fromkeys(("--heap-relief", "--no-heap-relief"), _NO_RELIEF),
    **dict.fromkeys(
        (
            *("--lozo-rank", "--lozo-interval", "--lozo-momentum", "--muon-rank"),
            *("--muon-interval", "--cone-angle", "--cone-decay"),
        ),
        _NO_METHOD,
    ),
    **dict.fromkeys(("--dora", "--use-dora"), _DORA),
    "--beta": _NO_PAIRS,
    "--warmup-ratio": "warmup is counted in steps: give --warmup-steps, as --steps times the ratio",
    **dict.fromkeys(
        ("-m", "--model", "--model-name-or-path", "--base-model", "--model-path", "--hf-path"),
        _BUNDLE,
    ),
    **dict.fromkeys(("--load-in-4bit", "--load-in-8bit", "--quantize", "--qlora"), _QUANTIZED),
    **dict.fromkeys(("--gradient-checkpointing", "--grad-checkpoint"), _MEMORY),
    **dict.fromkeys(("--bf16", "--fp16", "--tf32", "--dtype", "--torch-dtype"), _PRECISION),
    **dict.fromkeys(("--deepspeed", "--fsdp", "--num-processes", "--ddp"), _ONE_DEVICE),
    **dict.fromkeys(("--logging-steps", "--steps-per-report"), _LINES),
    "--mask-prompt": "prompts have no loss unless --loss-on all asks for it; leave it out",
    "--per-device-eval-batch-size": "held-out rows run together as far as the budget allows; leave "
    "it out",
    "--eval-batch-size": "held-out rows run together as far as the budget allows; leave it out",
    "--train": "`ondevice train` trains and `ondevice eval` evaluates; leave it out",
    "--test": "`ondevice train` trains and `ondevice eval` evaluates; leave it out",
    "--do-train": "`ondevice train` trains and `ondevice eval` evaluates; leave it out",
    "--do-eval": "give held-out data by --eval-data or --valid-split; leave it out",
    "--use-peft": "adapters are what is trained, unless --trainable full says otherwise; leave it "
    "out",
    "--modules-to-save": "adapters alone are trained, or all parameters (--trainable full); leave "
    "it out",
    "--prompt": "`ondevice generate BUNDLE --prompt TEXT` continues one, and `ondevice chat` reads "
    "what you say line by line; leave it out",
    **dict.fromkeys(
        ("--repeat-penalty", "--repetition-penalty", "--presence-penalty", "--frequency-penalty"),
        _PENALTY,
    ),
    "--push-to-hub": "nothing is sent anywhere; the run's folder can be uploaded",
    "--trust-remote-code": "code of models never runs; leave it out",
    "--export-gguf": "`ondevice fuse BUNDLE --adapter RUN --format gguf` writes a GGUF file",
    "--wandb": "give --report-to wandb",
}
