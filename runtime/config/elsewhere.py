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
_FLAGS = {  # the same for flags, some of one command: of two meanings, the first that it has counts
    "ondevice train --output": "--adapter-path",
    "ondevice eval --adapter": "--adapter-path",
    "ondevice generate --adapter": "--adapter-path",
    "ondevice chat --adapter": "--adapter-path",
    "ondevice fuse --adapter": "--adapter-path",
    "--adapter": (
        "--adapter-file --adapters --lora --peft-model --resume-adapter-file "
        "--adapter-name-or-path --lora-path --lora-model"
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
    "--lora-rank": "--lora-r --rank --r",
    "--lora-alpha": "--alpha",
    "--lora-targets": "--target-modules --lora-target-modules --lora-target --lora-keys --keys",
    "--lora-layers": "--num-layers --lora-num-layers",
    "--rslora": "--use-rslora",
    "--lora-dropout": "--dropout",
    "--trainable": "--fine-tune-type --finetuning-type --prefix-tuning --peft-type",
    "--prefix-length": "--num-prefix --num-virtual-tokens",
    "--queries": "--num-perturbations",
    "--epsilon": "--zo-eps",
    "--max-seq-length": (
        "--max-length --max-seq-len --block-size --cutoff-len --ctx-size --sequence-len "
        "--sequence-length --model-max-length"
    ),
    "--max-tokens": "--max-length --max-new-tokens --n-predict -n",
    "--pack": "--packing --sample-packing",
    "--data": (
        "--train-file --train-data --dataset --datasets --dataset-name --hf-dataset --data-path"
    ),
    "--eval-data": "--validation-file --valid-data --valid-file --eval-dataset --test-file",
    "--valid-split": "--val-set-size --val-size --validation-split --eval-split --test-size",
    "--eval-every": "--eval-steps --steps-per-eval --evals-per-epoch",
    "--eval-rows": "--val-batches --test-batches --max-eval-samples --limit --num-samples",
    "--save-every": "--save-steps",
    "--keep": "--save-total-limit",
    "--keep-best": "--load-best-model-at-end",
    "--patience": "--early-stopping-patience",
    "--output": "--output-dir --mlx-path --save-path --outfile --gguf-path",
    "--force": "--overwrite --overwrite-output-dir",
    "--shard-size": "--max-shard-size --split-max-size",
    "--calibrate": "--imatrix --calibration-data",
    "--bundle": "--base",
    "--columns": "--dataset-text-field --prompt-feature --text-feature",
    "--loss-on": "--assistant-only-loss --completion-only-loss --train-on-inputs",
    "--dtype": "--outtype --de-quantize --dequantize --torch-dtype",
    "--bits": (
        "--q-bits --outtype --quantization-bit --quantization --dtype --torch-dtype --dequantize -d"
    ),
    "--group-size": "--q-group-size",
    "--temperature": "--temp",
    "--chat": "--conversation --apply-chat-template -cnv",
    "--prompt": "-p",
    "--context": "-c --max-kv-size",
    "--config": "-c",
    "--system": "--system-prompt -sys",
    "--device": "--device-map --accelerator --use-cpu --no-cuda",
    "--seed": "-s --data-seed --random-seed",
    "--budget": "--memory --max-memory --memory-limit",
}

_VALUES = {  # values of our flags: those of other tools
    "--optimizer": {
        "adamw": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused",
        "sgd": "momentum",
    },
    "--lr-schedule": {
        "constant": "constant_with_warmup none",
        "linear": "linear_schedule linear_with_warmup polynomial",
        "cosine": "cosine_decay cosine_with_warmup cosine_with_restarts cosine_with_min_lr",
    },
    "--dtype": {"float16": "f16 fp16 half", "bfloat16": "bf16 auto", "float32": "f32 fp32 float"},
    "--bits": {
        "4": "q4_0 q4_1 q4_k_m q4_k_s q4_k 4bit nf4 fp4 int4",
        "8": "q8_0 8bit int8",
        "16": "f16 fp16 bf16 float16 bfloat16",
        "32": "f32 fp32 float32",
    },
    "--loss-on": {"all": "true"},
    "--to": {"gguf": "llama.cpp", "mlx": "mlx-lm mlx_lm", "peft": "hf huggingface transformers"},
    "--format": {"hf": "safetensors huggingface transformers mlx", "gguf": "llama.cpp"},
}

COMMANDS_ELSEWHERE = {theirs: ours for ours, names in _COMMANDS.items() for theirs in names.split()}
"""Our command for each of another tool."""
FLAGS_ELSEWHERE = {
    theirs: tuple(ours for ours, names in _FLAGS.items() if theirs in names.split())
    for theirs in " ".join(_FLAGS.values()).split()
}
"""Our flags for each of another tool, some behind their command: the first that it has is meant."""

VALUES_ELSEWHERE = {
    flag: {their: ours for ours, names in values.items() for their in names.split()}
    for flag, values in _VALUES.items()
}
"""Our value of a flag for each of another tool."""

_DORA = (
    "DoRA is not supported: it divides every output by the norm of a row of the merged weight W + "
    "s BA, which takes another pass over the dequantized weights after each update, and trains "
    "one more tensor for each matrix; no operation of a bundle does this. Use LoRA, and where the "
    "rank is high `ondevice train --rslora`"
)
_KINDS = (
    "there are LoRA, also as `ondevice train --rslora`, prefixes (`ondevice train --trainable "
    "prefix`), and all parameters with methods that see losses only (`ondevice train --trainable "
    "full --method mezo`)"
)
_NO_PAIRS = (
    "training on pairs of a chosen and a rejected answer (DPO and the like) is not supported; "
    "`ondevice train` learns from the chosen answers alone, as prompt and completion"
)

_ADVICE = {  # the way to the same end: flags that have no counterpart; commands are in backquotes
    "--adapter-path": (
        "`ondevice train --output RUN` writes an adapter, and `ondevice generate BUNDLE --adapter "
        "RUN` reads it"
    ),
    "--dora --use-dora": _DORA,
    "--use-adalora --use-ia3 --pissa --galore --vera --optim-target-modules --target-parameters "
    "--lora-target-parameters --trainable-token-indices --alora-invocation-tokens --use-qalora "
    "--qalora-group-size --use-bdlora --arrow-config --kasa-config --velora-config "
    "--monteclora-config": _KINDS,
    "--scale --lora-scale --lora-scaled": (
        "adapters are scaled by alpha / rank: give --lora-alpha, the scale times --lora-rank"
    ),
    "--lora-parameters": (
        "give --lora-rank and --lora-dropout, and as --lora-alpha the scale times the rank"
    ),
    "--layers-to-transform": "the last layers get adapters: --lora-layers says how many",
    "--exclude-modules": "--lora-targets names the layers that get adapters; leave it out",
    "--init-lora-weights --rank-pattern --alpha-pattern --layers-pattern --layer-replication "
    "--fan-in-fan-out --bias --lora-bias --loraplus-lr-ratio --loftq-config --eva-config "
    "--corda-config --lora-ga-config": (
        "all adapters of a run have one rank and alpha, and begin at no change; leave it out"
    ),
    "--beta": _NO_PAIRS,
    "--adam-beta1 --adam-beta2 --adam-epsilon --betas --optim-args --optimizer-config": (
        "AdamW's betas are 0.9 and 0.999, its epsilon is 1e-8; leave it out"
    ),
    "--lr-scheduler-kwargs": "--lr-schedule rises in --warmup-steps and falls to 0; leave it out",
    "--neftune-noise-alpha --label-smoothing-factor --label-smoothing --loss-type "
    "--router-aux-loss-coef": (
        "the loss is the plain cross entropy, without noise or smoothing; leave it out"
    ),
    "--save-strategy --eval-strategy --evaluation-strategy": (
        "it is counted in steps: --save-every and --eval-every, 0 for never"
    ),
    "--stage --task-type --lora-task-type --do-predict": (
        "what is trained predicts the next token of its answers (--loss-on); leave it out"
    ),
    "--max-samples --max-train-samples": (
        "give a file with fewer rows, such as: `head -n 1000 data.jsonl > fewer.jsonl`"
    ),
    "--dataset-config --dataset-config-name --dataset-split --dataset-train-split "
    "--dataset-test-split": "the dataset's name ends with them: --data OWNER/NAME:CONFIG:SPLIT",
    "--group-by-length --shuffle --shuffle-dataset --train-sampling-strategy --length-column-name "
    "--dataloader-num-workers --dataset-num-proc --preprocessing-num-workers --dataset-streaming "
    "--remove-unused-columns --padding-free --pad-to-multiple-of --packing-strategy --eval-packing "
    "--dataset-kwargs": (
        "rows are tokenized once, come in an order that --seed decides, and are padded to the "
        "bundle's lengths; leave it out"
    ),
    "--attn-implementation --flash-attn --flash-attention -fa --use-flash-attn": (
        "attention never holds the scores of all tokens, whatever the option; leave it out"
    ),
    "--use-liger-kernel --liger-kernel --liger-kernel-config --torch-compile "
    "--torch-compile-backend --torch-compile-mode": (
        "graphs are traced at export, and logits are never held whole; leave it out"
    ),
    "--run-name --project-name --project --logging-dir --model-name": (
        "a run is named by its folder (--output); leave it out"
    ),
    "--chat-template --chat-template-path --chat-template-config --template "
    "--ignore-chat-template --use-default-chat-template --jinja": (
        "conversations are written by the chat template of the bundle's tokenizer, and `ondevice "
        "generate --chat` and `ondevice chat` use it too; for another, put it into the "
        "checkpoint's tokenizer and export again"
    ),
    "--metric-for-best-model --greater-is-better": (
        "the held-out loss decides, and lower is better; leave it out"
    ),
    "--warmup-ratio": "warmup is counted in steps: give --warmup-steps, as --steps times the ratio",
    "-m --model --model-name-or-path --base-model --model-path --hf-path": (
        "a bundle is given without a flag, behind the command; a checkpoint becomes one by: "
        "`ondevice export MODEL -o BUNDLE`"
    ),
    "--model-revision": "it is chosen at the download: `hf download MODEL --revision REVISION`",
    "--load-in-4bit --load-in-8bit --quantize -q --qlora --bits --q-mode --group-size "
    "--bnb-4bit-quant-type --bnb-4bit-compute-dtype --bnb-4bit-quant-storage "
    "--use-bnb-nested-quant": (
        "weights are quantized once: `ondevice export MODEL -o BUNDLE --bits 4` (or 8, 16)"
    ),
    "--outtype": "adapters are written in float32; leave it out",
    "--gradient-checkpointing --gradient-checkpointing-kwargs --activation-checkpointing "
    "--activation-checkpointing-kwargs --grad-checkpoint --activation-offloading "
    "--clear-cache-threshold --torch-empty-cache-steps": (
        "activations are recomputed where the budget asks for it (--budget); leave it out"
    ),
    "--bf16 --fp16 --tf32 --bf16-full-eval --fp16-full-eval --dtype --torch-dtype": (
        "sums are computed in float32, whatever the bundle stores; leave it out, or give "
        "--compute-dtype bfloat16 for products of rounded factors, where the processor has them"
    ),
    "--deepspeed --fsdp --fsdp-config --num-processes --ddp --ddp-backend --ddp-timeout "
    "--local-rank --parallelism-config --accelerator-config": (
        "several processes share a training by mpirun and --parallel data=2; else leave it out"
    ),
    "--logging-steps --steps-per-report --logging-strategy --logging-first-step --disable-tqdm": (
        "every ten steps a line is printed, and all are in the run's metrics.jsonl; leave it out"
    ),
    "-ngl --n-gpu-layers --gpu-layers": (
        "where it computes is --device, and how much memory it takes is --budget; leave it out"
    ),
    "-t --threads": "the environment sets threads: `OPENBLAS_NUM_THREADS=2 ondevice ...`",
    "--mlock --no-mmap": "weights are mapped, and read where they are needed; leave it out",
    "--use-temp-file --no-lazy --bigendian --vocab-only --metadata --split-max-tensors --dry-run "
    "--remote": ("the file is written tensor by tensor, within --budget; leave it out"),
    "--image": "a bundle holds the language model alone, which reads text; leave it out",
    "--prefill-step-size": "the budget decides how much of a prompt is read at once; leave it out",
    "--quantize-activations -qa": "activations are never quantized; leave it out",
    "--kv-bits --kv-group-size --quantized-kv-start --max-kv-size --prompt-cache-file -ctk -ctv "
    "--cache-type-k --cache-type-v": (
        "keys and values of earlier tokens are kept in float32, within --budget; leave it out"
    ),
    "--draft-model --num-draft-tokens --model-draft": "one model computes each token; leave it out",
    "--xtc-probability --xtc-threshold --min-tokens-to-keep --typical-p --mirostat --do-sample "
    "--num-beams": (
        "--temperature, --top-k, --top-p and --min-p say how tokens are drawn; leave it out"
    ),
    "--extra-eos-token --stop --stop-token --eos-token": (
        "an answer ends at the end tokens of the tokenizer and its chat template, or after "
        "--max-tokens"
    ),
    "--prefill-response": (
        "the answer's beginning cannot be given; `ondevice generate BUNDLE --prompt TEXT` "
        "continues any text"
    ),
    "-i --interactive": "`ondevice chat BUNDLE` reads what you say",
    "--quant-predicate": (
        "bits are chosen by layer: `ondevice export MODEL -o BUNDLE --eight-bit LAYERS "
        "--embedding-bits BITS`"
    ),
    "--tasks --num-shots --num-fewshot --fewshot-as-multiturn": (
        "`ondevice eval BUNDLE --data FILE --task TASK` measures your own data; for public "
        "benchmarks write a checkpoint with `ondevice fuse`, and give that to them"
    ),
    "--mask-prompt": "prompts have no loss unless --loss-on all asks for it; leave it out",
    "--per-device-eval-batch-size --eval-batch-size": (
        "held-out rows run together as far as the budget allows; leave it out"
    ),
    "--train --test --do-train": (
        "`ondevice train` trains and `ondevice eval` evaluates; leave it out"
    ),
    "--do-eval": "give held-out data by --eval-data or --valid-split; leave it out",
    "--use-peft": (
        "adapters are what is trained, unless --trainable full says otherwise; leave it out"
    ),
    "--modules-to-save --lora-modules-to-save": (
        "adapters alone are trained, or all parameters (--trainable full); leave it out"
    ),
    "--prompt": (
        "`ondevice generate BUNDLE --prompt TEXT` continues one, and `ondevice chat` reads what "
        "you say line by line; leave it out"
    ),
    "--repeat-penalty --repetition-penalty --presence-penalty --frequency-penalty": (
        "tokens are drawn without penalties for repetition; --temperature, --top-k, --top-p and "
        "--min-p say how evenly"
    ),
    "--push-to-hub --upload-repo --hub-model-id --hub-token --hub-private-repo --hub-strategy "
    "--hub-always-push --hub-revision": (
        "nothing is sent anywhere; the folder that is written can be uploaded"
    ),
    "--trust-remote-code": "code of models never runs; leave it out",
    "--export-gguf": "`ondevice fuse BUNDLE --adapter RUN --format gguf` writes a GGUF file",
    "--wandb": "give --report-to wandb",
}
ADVICE = {flag: way for flags, way in _ADVICE.items() for flag in flags.split()}
"""Flags with no counterpart, and the way to the same end."""

_COMMAND_ADVICE = {  # the same for commands
    "dpo orpo kto grpo ppo rlhf": _NO_PAIRS,
    "serve": (
        "nothing is served over the network; `ondevice chat` answers line by line, and `ondevice "
        "fuse --format gguf` writes a file for servers such as llama-server"
    ),
    "push": "nothing is sent anywhere; the run's folder can be uploaded",
}
COMMAND_ADVICE = {word: way for words, way in _COMMAND_ADVICE.items() for word in words.split()}
"""Commands of other tools that have no counterpart, and the way to the same end."""

_VALUE_ADVICE = {  # the same for values of our flags, or of their names there
    "--trainable": {
        "dora": _DORA,
        "qlora": "adapters are trained beside quantized weights by --trainable lora, the default",
        "freeze adalora ia3 vera loha lokr oft": _KINDS,
    },
    "--method": {"lora qlora dora prefix full sft": _KINDS},
    "--optimizer": {
        "adafactor muon lion lion_8bit galore_adamw rmsprop adagrad adamw_8bit adamw_bnb_8bit "
        "paged_adamw_8bit paged_adamw_32bit": (
            "the state of adamw lies on the disk, so smaller states of other optimizers would "
            "save no memory"
        ),
    },
    "--report-to": {
        "mlflow swanlab comet_ml clearml all": (
            "there are --report-to tensorboard and wandb, and the run's metrics.jsonl for any other"
        ),
    },
    "--dtype": {
        "q8_0 q4_0 q4_k_m q5_k_m q6_k tq1_0 tq2_0": (
            "a fused file holds floats (--dtype float16), of which llama.cpp's llama-quantize "
            "makes this"
        ),
    },
    "--bits": {
        "2 3 5 6 q5_k_m q6_k q3_k_m q2_k": (
            "weights are quantized to 4 or 8 bits; `ondevice export MODEL -o BUNDLE --eight-bit "
            "LAYERS` gives some layers 8 instead"
        ),
    },
}
VALUE_ADVICE = {
    flag: {value: way for values, way in ways.items() for value in values.split()}
    for flag, ways in _VALUE_ADVICE.items()
}
"""What to do in place of another tool's value of a flag of ours, or of its name there."""
