"""Writes the logits of llama.cpp's model with a LoRA adapter: an own interpreter's.

python llama_logits.py MODEL.gguf ADAPTER.gguf TOKENS OUTPUT.npy   ADAPTER may be "-"
python llama_logits.py FOLDER   each folder inside has model.gguf and tokens.npy (T,); logits.npy
is written there, or refused.txt where llama.cpp does not load it. Without llama_cpp, whose package
has to be compiled, the wheel of cyllama computes these.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

try:
    import llama_cpp
except ImportError:
    llama_cpp = None
    from cyllama.llama import llama_cpp as cyllama


def logits_of_cyllama(model_path: str, tokens: list[int]) -> np.ndarray:
    """(T, V)."""

    class Model(cyllama.LlamaModel):
        """With the number that a context asks for, and version 0.2.18 has elsewhere."""

        @property
        def n_vocab(self) -> int:
            return int(self.get_vocab().n_vocab)

    model = Model(model_path, cyllama.LlamaModelParams())
    wanted = cyllama.LlamaContextParams()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = max(64, len(tokens))
    wanted.n_threads = wanted.n_threads_batch = 1
    wanted.type_k = wanted.type_v = 0  # float32 keys and values
    wanted.flash_attn_type = 0
    context = cyllama.LlamaContext(model, wanted)
    batch = cyllama.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    for position, token in enumerate(tokens):
        batch.add(token, position, [0], True)
    context.decode(batch)
    return np.array([context.get_logits_ith(i) for i in range(len(tokens))], np.float32)


def logits(model_path: str, adapter_path: str, tokens: list[int]) -> np.ndarray:
    """(T, V)."""
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap = True
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), settings)
    assert model, f"{model_path} is not loaded"
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = max(64, len(tokens))
    wanted.n_threads = 1
    wanted.type_k = wanted.type_v = 0  # float32 keys and values
    wanted.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, wanted)
    assert context, "there is no context"
    if adapter_path != "-":
        adapter = llama_cpp.llama_adapter_lora_init(model, adapter_path.encode())
        assert adapter, f"{adapter_path} is not loaded"
        if hasattr(llama_cpp, "llama_set_adapters_lora"):
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            scales = (ctypes.c_float * 1)(1.0)
            code = llama_cpp.llama_set_adapters_lora(context, adapters, 1, scales)
        else:
            code = llama_cpp.llama_set_adapter_lora(context, adapter, 1.0)
        assert code == 0, code
    count = len(tokens)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = (llama_cpp.llama_get_logits_ith(context, i) for i in range(count))
    found = np.array([np.ctypeslib.as_array(row, (size,)) for row in rows])
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


(llama_cpp or cyllama).llama_backend_init()
if len(sys.argv) > 2:
    model_path, adapter_path, words, output = sys.argv[1:]
    np.save(output, logits(model_path, adapter_path, list(map(int, words.split(",")))))
else:
    for path in sorted(Path(sys.argv[1]).glob("*/tokens.npy")):
        model, tokens = str(path.with_name("model.gguf")), np.load(path).tolist()
        try:
            found = logits(model, "-", tokens) if llama_cpp else logits_of_cyllama(model, tokens)
        except (AssertionError, ValueError, RuntimeError) as problem:
            path.with_name("refused.txt").write_text(str(problem))
            continue
        np.save(path.with_name("logits.npy"), found)
