"""Blocks of attention with their log-sum-exp, and how blocks over different keys become one.

Torch's fused kernels do the work where they serve; elsewhere it is written out. Which blocks there
are is plan.context's, who sends what is the callers'. Tensors of a block are [B, heads, S, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raymega.parallel.workarounds.matmul import is_emulated

aten = torch.ops.aten


class AttentionTile(NamedTuple):
    """Output of one block, [B, H, S, K], and the log of each row's sum of exp(scores), [B, H, S]."""

    out: Tensor
    log_sum_exp: Tensor


class Gradients(NamedTuple):
    """By the queries [B, H, S, K], the keys and the values [B, G, T, K] of one block."""

    q: Tensor
    k: Tensor
    v: Tensor


class Kernel(Protocol):
    """One way to compute blocks; H / G neighbouring query heads read one key head."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """Attention of q [B, H, S, K] over k and v [B, G, T, K]; causal ones have S = T."""

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionTile, *, is_causal: bool
    ) -> Gradients:
        """From ``grad`` [B, H, S, K] by the output; ``whole`` is over all keys that the rows see."""


def kernel_for(q: Tensor) -> Kernel:
    """The fastest that serves tensors like ``q`` [..., K]."""
    if q.device.type == "cpu":
        return Cpu
    is_narrow = q.dtype in (torch.bfloat16, torch.float16)
    return Flash if is_narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 else MathAttention


def merge(into: AttentionTile, block: AttentionTile) -> None:
    """Add keys: ``into`` becomes attention over its keys and those of ``block``, in its own format.

    A row without keys (log-sum-exp -inf) adds nothing, and two such rows stay one.
    """
    other = block.log_sum_exp.to(into.log_sum_exp.dtype)
    total = torch.logaddexp(into.log_sum_exp, other)
    # -inf - -inf is no number; with any finite stand-in the shares of a row without keys are 0.
    finite = total.masked_fill(total == -torch.inf, 0.0)
    into.out.mul_((into.log_sum_exp - finite).exp_().unsqueeze(-1))
    into.out.addcmul_(block.out.to(into.out.dtype), (other - finite).exp_().unsqueeze(-1))
    into.log_sum_exp.copy_(total)


class Cpu:
    """Torch's flash kernel for CPUs, which wants a key head for each query head.

    Where heads share keys it runs once for each sharer, so that nothing is copied.
    """

    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """See Kernel."""
        if q.shape[1] == k.shape[1]:
            return AttentionTile(*Cpu.kernel(q, k, v, 0.0, is_causal))
        blocks = [Cpu.kernel(rows, k, v, 0.0, is_causal) for rows in _by_sharer(q, k)]
        outs, numbers = zip(*blocks, strict=True)
        return AttentionTile(
            torch.stack(outs, 2).flatten(1, 2), torch.stack(numbers, 2).flatten(1, 2)
        )

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionTile, *, is_causal: bool
    ) -> Gradients:
        """See Kernel."""
        if is_emulated(q):
            whole = AttentionTile(whole.out.float(), whole.log_sum_exp)
            by = Cpu.backward(
                grad.float(), q.float(), k.float(), v.float(), whole, is_causal=is_causal
            )
            return Gradients(*(t.to(q.dtype) for t in by))
        found = [
            Gradients(*Cpu.gradients(mine, rows, k, v, out, numbers, 0.0, is_causal))
            for mine, rows, out, numbers in zip(
                *(_by_sharer(t, k) for t in (grad, q, whole.out, whole.log_sum_exp)), strict=True
            )
        ]
        by_q, by_k, by_v = zip(*found, strict=True)
        return Gradients(torch.stack(by_q, 2).flatten(1, 2), sum(by_k), sum(by_v))


class Flash:
    """Torch's flash kernel for GPUs, which knows shared key heads; half precision only."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """See Kernel."""
        out, log_sum_exp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return AttentionTile(out, log_sum_exp)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionTile, *, is_causal: bool
    ) -> Gradients:
        """See Kernel."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return Gradients(
            *aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, whole.out, whole.log_sum_exp, None, None, q.shape[2], k.shape[2],
                0.0, is_causal, no_dropout, no_dropout[:0],
            )
        )  # fmt: skip


class MathAttention:
    """Step by step, with all S x T weights in memory at once: for what no fused kernel serves."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """See Kernel."""
        scores = _scores(q, k, is_causal=is_causal)
        log_sum_exp = scores.logsumexp(-1)
        weights = (scores - log_sum_exp.unsqueeze(-1)).exp_()
        out = (weights.to(v.dtype).flatten(2, 3) @ v).unflatten(2, scores.shape[2:4])
        return AttentionTile(out.flatten(1, 2), log_sum_exp.flatten(1, 2))

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionTile, *, is_causal: bool
    ) -> Gradients:
        """See Kernel."""
        scores, groups = _scores(q, k, is_causal=is_causal), k.shape[1]
        q, grad, out = (t.unflatten(1, (groups, -1)) for t in (q, grad, whole.out))
        log_sum_exp = whole.log_sum_exp.unflatten(1, (groups, -1))
        weights = (scores - log_sum_exp.unsqueeze(-1)).exp_()
        drift = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
        slope = (grad.flatten(2, 3) @ v.mT).unflatten(2, scores.shape[2:4]) - drift
        slope = slope.mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype).flatten(2, 3)
        return Gradients(
            (slope @ k).unflatten(2, scores.shape[2:4]).flatten(1, 2),
            slope.mT @ q.flatten(2, 3),
            weights.to(grad.dtype).flatten(2, 3).mT @ grad.flatten(2, 3),
        )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_sharer(x: Tensor, k: Tensor) -> Iterator[Tensor]:
    """Of x [B, H, ...] the first query heads of all key heads of k [B, G, ...], the second, ..."""
    yield from x.unflatten(1, (k.shape[1], -1)).unbind(2)


def _scores(q: Tensor, k: Tensor, *, is_causal: bool) -> Tensor:
    """[B, G, H/G, S, T] in max(fp32, dtype), -inf where nothing is seen."""
    rows = q.unflatten(1, (k.shape[1], -1))
    scores = (rows.flatten(2, 3) @ k.mT).unflatten(2, rows.shape[2:4])
    scores = scores.to(_wide(q)).mul_(q.shape[-1] ** -0.5)
    if is_causal:
        scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf
        )
    return scores
