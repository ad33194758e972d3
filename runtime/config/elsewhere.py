"""Commands and flags of mlx-lm, PEFT, TRL, transformers and llama.cpp, and their names here."""

from __future__ import annotations

COMMANDS_ELSEWHERE = {
    "finetune": "train",
    "fine-tune": "train",
    "lora": "train",
    "sft": "train",
    "tune": "train",
    "fit": "train",
    "resume": "train --resume",
    "convert": "export",
    "quantize": "export",
    "import": "export",
    "evaluate": "eval",
    "test": "eval",
    "perplexity": "eval",
    "validate": "eval",
    "infer": "generate",
    "predict": "generate",
    "complete": "generate",
    "run": "generate",
    "merge": "fuse",
    "benchmark": "bench",
    "show": "inspect",
    "info": "inspect",
    "dataset": "data",
    "check": "doctor",
    "env": "doctor",
    "diagnose": "doctor",
    "completions": "completion",
    "help": "--help",
    "version": "--version",
}

FLAGS_ELSEWHERE: dict[str, tuple[str, ...]] = {  # the first that a command has is meant
    "--adapter-path": ("--adapter",),
    "--adapter-file": ("--adapter",),
    "--adapters": ("--adapter",),
    "--lora": ("--adapter",),
    "--peft-model": ("--adapter",),
    "--resume-adapter-file": ("--adapter",),
    "--resume-from-checkpoint": ("--resume",),
    "--iters": ("--steps",),
    "--max-steps": ("--steps",),
    "--max-iters": ("--steps",),
    "--num-steps": ("--steps",),
    "--lr": ("--learning-rate",),
    "--lr-scheduler-type": ("--lr-schedule",),
    "--lr-scheduler": ("--lr-schedule",),
    "--scheduler": ("--lr-schedule",),
    "--warmup": ("--warmup-steps",),
    "--per-device-train-batch-size": ("--batch-size",),
    "--train-batch-size": ("--batch-size",),
    "--micro-batch-size": ("--batch-size",),
    "--gradient-accumulation-steps": ("--grad-accumulation",),
    "--grad-accumulation-steps": ("--grad-accumulation",),
    "--accumulate-grad-batches": ("--grad-accumulation",),
    "--optim": ("--optimizer",),
    "--max-gradient-norm": ("--max-grad-norm",),
    "--gradient-clipping": ("--max-grad-norm",),
    "--lora-r": ("--lora-rank",),
    "--rank": ("--lora-rank",),
    "--alpha": ("--lora-alpha",),
    "--target-modules": ("--lora-targets",),
    "--lora-target-modules": ("--lora-targets",),
    "--lora-keys": ("--lora-targets",),
    "--num-layers": ("--lora-layers",),
    "--lora-num-layers": ("--lora-layers",),
    "--use-rslora": ("--rslora",),
    "--dropout": ("--lora-dropout",),
    "--fine-tune-type": ("--trainable",),
    "--prefix-tuning": ("--trainable",),
    "--num-prefix": ("--prefix-length",),
    "--num-virtual-tokens": ("--prefix-length",),
    "--num-perturbations": ("--queries",),
    "--zo-eps": ("--epsilon",),
    "--max-length": ("--max-seq-length", "--max-tokens"),
    "--max-seq-len": ("--max-seq-length",),
    "--block-size": ("--max-seq-length",),
    "--cutoff-len": ("--max-seq-length",),
    "--ctx-size": ("--max-seq-length",),
    "--packing": ("--pack",),
    "--train-file": ("--data",),
    "--train-data": ("--data",),
    "--dataset": ("--data",),
    "--dataset-name": ("--data",),
    "--validation-file": ("--eval-data",),
    "--valid-data": ("--eval-data",),
    "--eval-steps": ("--eval-every",),
    "--steps-per-eval": ("--eval-every",),
    "--val-batches": ("--eval-rows",),
    "--test-batches": ("--eval-rows",),
    "--max-eval-samples": ("--eval-rows",),
    "--save-steps": ("--save-every",),
    "--save-total-limit": ("--keep",),
    "--load-best-model-at-end": ("--keep-best",),
    "--early-stopping-patience": ("--patience",),
    "--output-dir": ("--output",),
    "--mlx-path": ("--output",),
    "--save-path": ("--output",),
    "--outfile": ("--output",),
    "--dataset-text-field": ("--columns",),
    "--prompt-feature": ("--columns",),
    "--text-feature": ("--columns",),
    "--assistant-only-loss": ("--loss-on",),
    "--completion-only-loss": ("--loss-on",),
    "--train-on-inputs": ("--loss-on",),
    "--q-bits": ("--bits",),
    "--outtype": ("--bits",),
    "--q-group-size": ("--group-size",),
    "--temp": ("--temperature",),
    "--max-new-tokens": ("--max-tokens",),
    "--n-predict": ("--max-tokens",),
    "-n": ("--max-tokens",),
    "-p": ("--prompt",),
    "-c": ("--context", "--config"),
    "--system-prompt": ("--system",),
    "--memory": ("--budget",),
    "--max-memory": ("--budget",),
    "--memory-limit": ("--budget",),
}

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
_STEPS = (
    "training is counted in steps, and an epoch has rows / (--batch-size x --grad-accumulation) of "
    "them; give --steps (`ondevice data` counts rows)"
)

ADVICE = {  # flags with no counterpart: the way to the same end
    **dict.fromkeys(("--dora", "--use-dora"), _DORA),
    **dict.fromkeys(("--num-train-epochs", "--num-epochs", "--epochs"), _STEPS),
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
