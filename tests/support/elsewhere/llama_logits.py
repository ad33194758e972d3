"""Writes the logits of llama.cpp's model with a LoRA adapter: an own interpreter's.

python llama_logits.py MODEL.gguf ADAPTER.gguf TOKENS OUTPUT.npy   ADAPTER may be "-"
python llama_logits.py FOLDER   each folder inside has model.gguf and tokens.npy (T,); logits.npy
is written there, or refused.txt where llama.cpp does not load it.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def logits(model_path: str, adapter_path: str, tokens: list[int]) -> np.ndarray:
    """(T, V)."""
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap = True
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), settings)
    assert model, f"{model_path} is not loaded"
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_threads = 64, 64, 1
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


llama_cpp.llama_backend_init()
if len(sys.argv) > 2:
    model_path, adapter_path, words, output = sys.argv[1:]
    np.save(output, logits(model_path, adapter_path, list(map(int, words.split(",")))))
else:
    for path in sorted(Path(sys.argv[1]).glob("*/tokens.npy")):
        try:
            found = logits(str(path.with_name("model.gguf")), "-", np.load(path).tolist())
        except AssertionError as problem:
            path.with_name("refused.txt").write_text(str(problem))
            continue
        np.save(path.with_name("logits.npy"), found)
