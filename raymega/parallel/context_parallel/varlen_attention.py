"""Attention inside packed documents by one kernel for all of them, on GPUs.

torch's variable-length flash kernel: when it applies, and the call. On CPUs and in float32,
`attention.py` computes the same one document at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from raymega.parallel.context_parallel.attention_blocks import Flash, kernel_for

CAUSAL, BOTH_SIDES = (-1, 0), (-1, -1)
"""Numbers of tokens before and after itself that a token sees; -1 is all of its document."""


@cache
def torch_kernel() -> Callable[..., Any] | None:
    """Return torch's function; None where torch is older and its function has no windows.

    The import is late because it loads torch's compiler, which takes a second.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None


def _sharing(kernel: Callable[..., Any], q: Tensor, k: Tensor) -> dict[str, bool]:
    """Return the option that lets query heads share key heads, where torch asks for one (2.12 on)."""
    asks = "enable_gqa" in signature(kernel).parameters
    return {"enable_gqa": k.shape[1] < q.shape[1]} if asks else {}


def has_one_kernel(q: Tensor) -> bool:
    """Return whether the variable-length kernel supports ``q``; its limits are the flash kernel's."""
    return kernel_for(q) is Flash and torch_kernel() is not None


def attend_in_documents(  # noqa: PLR0913  # one a property of the rows
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ends: Tensor,
    longest: int,
    are_alike: bool,
    is_causal: bool = True,
) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v within each document.

    Args:
        q: Queries [S, B, H, K].
        k: Keys [S, B, G, K]; H / G neighbouring query heads read one key head.
        v: Values [S, B, G, K].
        ends: Cumulative lengths [N + 1] int32 of the documents, from 0, with the rows end to end.
        longest: Number of tokens of the longest document.
        are_alike: True where ``ends`` describes one row, and all rows have the same documents.
        is_causal: Whether a token sees no later ones.

    Returns:
        Outputs [S, B, H, K].
    """
    num_tokens, num_rows = q.shape[:2]
    if are_alike and num_rows > 1:
        ends = _of_all_rows(ends, num_tokens, num_rows)
    # The kernel takes the rows end to end: [B * S, heads, K].
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
        window_size=CAUSAL if is_causal else BOTH_SIDES,
        **_sharing(kernel, q_THK, k_TGK),
    )
    assert isinstance(out_THK, Tensor), "nothing but the output was asked for"
    return out_THK.unflatten(0, (num_rows, num_tokens)).transpose(0, 1)


def _of_all_rows(ends: Tensor, num_tokens: int, num_rows: int) -> Tensor:
    """Repeat one row's cumulative lengths for all rows, on the device, without a host sync."""
    firsts = num_tokens * torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.cat([ends[:1], (ends[1:] + firsts[:, None]).flatten()])
