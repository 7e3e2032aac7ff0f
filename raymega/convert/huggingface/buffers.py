"""Tensors of files that are no weights of the model: buffers, and parts that transformers leaves out."""

from __future__ import annotations

import re

# Buffers in old files: causal masks, RoPE's angles, numbers of positions.
_BUFFER = re.compile(
    r".*\.(EncDecAttention\.relative_attention_bias\.weight|(attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq|embeddings\.position_ids)"
)
LEFT_OUT = "mtp."
"""Begin of names of multi-token prediction in files of Qwen3-Next and Nemotron-H, which transformers has no modules for."""


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer that old files hold, or of a module that transformers leaves out, and no weight."""
    return name.startswith(LEFT_OUT) or _BUFFER.fullmatch(f".{name}") is not None
