"""Writes the logits of llama.cpp's model, by the wheel of cyllama: an own interpreter's.

python llama_logits.py MODEL.gguf ADAPTER.gguf TOKENS OUTPUT.npy   ADAPTER may be "-"
python llama_logits.py FOLDER   each folder inside has model.gguf, tokens.npy (T,), and perhaps
adapter.gguf; logits.npy is written there, or refused.txt where llama.cpp does not load it.
"""

import sys
from pathlib import Path

import numpy as np
from cyllama.llama import llama_cpp


class Model(llama_cpp.LlamaModel):
    """With the number that a context asks for, and version 0.2.18 has elsewhere."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


def logits(model_path: str, adapter_path: str, tokens: list[int]) -> np.ndarray:
    """(T, V)."""
    model = Model(model_path, llama_cpp.LlamaModelParams())
    wanted = llama_cpp.LlamaContextParams()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = max(64, len(tokens))
    wanted.n_threads = wanted.n_threads_batch = 1
    wanted.type_k = wanted.type_v = 0  # float32 keys and values
    wanted.flash_attn_type = 0
    context = llama_cpp.LlamaContext(model, wanted)
    if adapter_path != "-":
        context.set_adapters_lora([(model.lora_adapter_init(adapter_path), 1.0)])
    batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    for position, token in enumerate(tokens):
        batch.add(token, position, [0], True)
    context.decode(batch)
    return np.array([context.get_logits_ith(i) for i in range(len(tokens))], np.float32)


llama_cpp.llama_backend_init()
if len(sys.argv) > 2:
    model_path, adapter_path, words, output = sys.argv[1:]
    np.save(output, logits(model_path, adapter_path, list(map(int, words.split(",")))))
else:
    for path in sorted(Path(sys.argv[1]).glob("*/tokens.npy")):
        adapter = path.with_name("adapter.gguf")
        words = str(path.with_name("model.gguf")), str(adapter) if adapter.exists() else "-"
        try:
            found = logits(*words, np.load(path).tolist())
        except (ValueError, RuntimeError) as problem:
            path.with_name("refused.txt").write_text(str(problem))
            continue
        np.save(path.with_name("logits.npy"), found)
