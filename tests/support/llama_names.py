"""llama.cpp's names of tensors and its order of Llama's rows, written down by hand."""

from __future__ import annotations

import numpy as np

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def in_llamas_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (out, C), of which those of each head's halves alternate, one by one."""
    size = len(rows) // heads
    order = []
    for start in range(0, len(rows), size):
        for j in range(size // 2):
            order += [start + j, start + size // 2 + j]
    return rows[order]
