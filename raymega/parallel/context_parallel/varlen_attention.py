"""Attention inside packed documents by one kernel for all of them, on GPUs.

It owns when torch's variable-length flash kernel serves, and its call. Everywhere else, on CPUs and in
wide formats, context_attention computes the same a document at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from raymega.parallel.context_parallel.attention_blocks import Flash, kernel_for

CAUSAL = (-1, 0)
"""How many tokens before and behind itself a token sees; -1 is all of its document."""


@cache
def torch_kernel() -> Callable[..., Any] | None:
    """Torch's function; None when it is an older one with other parameters.

    It brings torch's compiler, a second of loading that a process without a GPU is spared.
    """
    from torch.nn.attention.varlen import varlen_attn

    takes_all = {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys()
    return varlen_attn if takes_all else None


def has_one_kernel(q: Tensor) -> bool:
    """Torch's variable-length kernel serves tensors like ``q``: those that its flash kernel does."""
    return kernel_for(q) is Flash and torch_kernel() is not None


def attend_in_documents(  # one a property of the rows
    q: Tensor, k: Tensor, v: Tensor, *, ends: Tensor, longest: int, are_alike: bool
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v inside each document.

    Args:
        q: [S, B, H, K].
        k: [S, B, G, K]; H / G neighbouring query heads read one key head.
        v: [S, B, G, K].
        ends: [N + 1] int32: 0, and where each document ends when rows lie end to end.
        longest: Tokens of the longest document.
        are_alike: ``ends`` are of one row, and all have the same documents.

    Returns:
        [S, B, H, K].
    """
    num_tokens, num_rows = q.shape[:2]
    if are_alike and num_rows > 1:
        ends = _of_all_rows(ends, num_tokens, num_rows)
    q_THK, k_TGK, v_TGK = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    kernel = torch_kernel()
    assert kernel is not None, "has_one_kernel was asked"
    out_THK = kernel(
        q_THK,
        k_TGK,
        v_TGK,
        ends,
        ends,
        longest,
        longest,
        window_size=CAUSAL,
        enable_gqa=k.shape[2] < q.shape[2],
    )
    assert isinstance(out_THK, Tensor), "nothing but the output was asked for"
    return out_THK.unflatten(0, (num_rows, num_tokens)).transpose(0, 1)


def _of_all_rows(ends: Tensor, num_tokens: int, num_rows: int) -> Tensor:
    """The ends in the first row, the second, ...; nothing waits for the device."""
    firsts = num_tokens * torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.cat([ends[:1], (ends[1:] + firsts[:, None]).flatten()])
