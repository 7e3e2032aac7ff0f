"""Blocks of attention with their log-sum-exp, and the merge of blocks over different keys.

torch's fused kernels are used where they apply; elsewhere attention is written out.
`plan/cp_layout.py` decides which blocks exist. Tensors of a block are [B, heads, S, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """Gradients of the queries [B, H, S, K], the keys and the values [B, G, T, K] of one block."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRules:
    """Scores of a layer: ``window`` tokens that a query sees, 0 for all, and ``softcap``, 0 for none.

    With ``chunk`` a query sees the earlier tokens of its own chunk of ``chunk`` tokens; blocks end where
    chunks do.
    A cap turns scaled scores s into softcap * tanh(s / softcap), before any is masked (Gemma 2). Where
    they are not causal, a query sees the later tokens of its document too; then they are plain.
    """

    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    is_causal: bool = True

    @property
    def is_plain(self) -> bool:
        """True where fused kernels compute the scores."""
        return not (self.window or self.softcap or self.chunk)


PLAIN = ScoreRules()


class Kernel(Protocol):
    """A kernel that computes blocks; H / G neighbouring query heads read one key head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """Return attention of q [B, H, S, K] over k and v [B, G, T, K]; S = T where it is causal."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: AttentionTile,
        *,
        is_causal: bool,
    ) -> Gradients:
        """Return the block's gradients, from ``grad`` [B, H, S, K] of the output.

        ``whole`` is the attention over all keys that the queries see, in all blocks.
        """


def kernel_for(q: Tensor) -> Kernel:
    """Return the fastest kernel that supports the device, dtype and head width of ``q`` [..., K]."""
    if q.device.type == "cpu":
        return Cpu
    # limits of torch's flash kernel: 16 bits, head width a multiple of 8 and at most 256
    is_narrow = q.dtype in (torch.bfloat16, torch.float16)
    return Flash if is_narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 else MathAttention()


def merge(into: AttentionTile, block: AttentionTile) -> None:
    """Make ``into`` the attention over its own keys and those of ``block``, in its own format.

    A query without keys has log-sum-exp -inf: it adds nothing, and the merge of two such stays one.
    """
    other = block.log_sum_exp.to(into.log_sum_exp.dtype)
    total = torch.logaddexp(into.log_sum_exp, other)
    # -inf - -inf is NaN. With any finite value in its place the weights of a query without keys are 0.
    finite = _finite(total)
    into.out.mul_((into.log_sum_exp - finite).exp_().unsqueeze(-1))
    into.out.addcmul_(block.out.to(into.out.dtype), (other - finite).exp_().unsqueeze(-1))
    into.log_sum_exp.copy_(total)


class Cpu:
    """torch's flash kernel for CPUs, which needs as many key heads as query heads.

    Where query heads share a key head it runs H / G times, so that no keys are copied.
    """

    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """See Kernel."""
        if q.shape[1] == k.shape[1]:
            return AttentionTile(*Cpu.kernel(q, k, v, 0.0, is_causal))
        # shared key heads: one call for each query head of a key head, then back to head order
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
        # a CPU without 16-bit instructions: compute in float32, round once
        if is_emulated(q):
            whole = AttentionTile(whole.out.float(), whole.log_sum_exp)
            by = Cpu.backward(
                grad.float(), q.float(), k.float(), v.float(), whole, is_causal=is_causal
            )
            return Gradients(*(t.to(q.dtype) for t in by))
        # shared key heads: the gradients of keys and values sum over the calls
        found = [
            Gradients(*Cpu.gradients(mine, rows, k, v, out, numbers, 0.0, is_causal))
            for mine, rows, out, numbers in zip(
                *(_by_sharer(t, k) for t in (grad, q, whole.out, whole.log_sum_exp)), strict=True
            )
        ]
        by_q, by_k, by_v = zip(*found, strict=True)
        return Gradients(torch.stack(by_q, 2).flatten(1, 2), sum(by_k), sum(by_v))


class Flash:
    """torch's flash kernel for GPUs: bfloat16 and float16 only, with shared key heads (GQA)."""

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
        # The kernel reads the log-sum-exps as if they were contiguous. Those of some of a rank's queries are not.
        log_sum_exp = whole.log_sum_exp.contiguous()
        # It wants the state of dropout's generator, and ignores it at rate 0.
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return Gradients(
            *aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, whole.out, log_sum_exp, None, None, q.shape[2], k.shape[2],
                0.0, is_causal, no_dropout, no_dropout[:0],
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MathAttention:
    """Attention written out, with all S x T weights in memory: for formats that no fused kernel takes.

    It alone knows windows and caps. ``distance`` is the position of the first query less that of the
    first key.
    """

    rules: ScoreRules = PLAIN
    distance: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> AttentionTile:
        """See Kernel."""
        scores = self._masked(self._capped(_scores(q, k)), is_causal=is_causal)
        log_sum_exp = scores.logsumexp(-1)
        weights = (scores - _finite(log_sum_exp).unsqueeze(-1)).exp_()
        out = (weights.to(v.dtype).flatten(2, 3) @ v).unflatten(2, scores.shape[2:4])
        return AttentionTile(out.flatten(1, 2), log_sum_exp.flatten(1, 2))

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: AttentionTile,
        *,
        is_causal: bool,
    ) -> Gradients:
        """See Kernel."""
        capped, groups = self._capped(_scores(q, k)), k.shape[1]
        q, grad, out = (t.unflatten(1, (groups, -1)) for t in (q, grad, whole.out))
        log_sum_exp = whole.log_sum_exp.unflatten(1, (groups, -1))
        # tanh' = 1 - tanh^2, before the mask overwrites the scores
        rise = 1 - (capped / self.rules.softcap).square() if self.rules.softcap else None
        scores = self._masked(capped, is_causal=is_causal)
        # recompute the softmax over all keys from the saved log-sum-exp
        weights = (scores - log_sum_exp.unsqueeze(-1)).exp_()
        drift = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
        # softmax backward: dS = P * (dP - rowsum(dO * O)), as in FlashAttention
        slope = (grad.flatten(2, 3) @ v.mT).unflatten(2, scores.shape[2:4]) - drift
        slope = slope.mul_(weights).mul_(q.shape[-1] ** -0.5)
        slope = (slope if rise is None else slope.mul_(rise)).to(q.dtype).flatten(2, 3)
        return Gradients(
            (slope @ k).unflatten(2, scores.shape[2:4]).flatten(1, 2),
            slope.mT @ q.flatten(2, 3),
            weights.to(grad.dtype).flatten(2, 3).mT @ grad.flatten(2, 3),
        )

    def _capped(self, scores: Tensor) -> Tensor:
        cap = self.rules.softcap
        return scores.div_(cap).tanh_().mul_(cap) if cap else scores

    def _masked(self, scores: Tensor, *, is_causal: bool) -> Tensor:
        """Set the scores of keys that a query does not see to -inf, in place."""
        # Elements on diagonal d of the block are keys d - distance positions behind their query.
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if is_causal:
            scores.masked_fill_(seen.triu(self.distance + 1), -torch.inf)
        if self.rules.window:
            scores.masked_fill_(seen.tril(self.distance - self.rules.window), -torch.inf)
        return scores


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_sharer(x: Tensor, k: Tensor) -> Iterator[Tensor]:
    """Yield [B, G, ...] for each of the H / G query heads of x [B, H, ...] that share a key head of k."""
    yield from x.unflatten(1, (k.shape[1], -1)).unbind(2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scaled scores [B, G, H/G, S, T] in fp32 or better."""
    rows = q.unflatten(1, (k.shape[1], -1))
    scores = (rows.flatten(2, 3) @ k.mT).unflatten(2, rows.shape[2:4])
    return scores.to(_wide(q)).mul_(q.shape[-1] ** -0.5)


def _finite(log_sum_exp: Tensor) -> Tensor:
    """Return log-sum-exps with 0 for those of queries that see no key, whose weights are then 0."""
    return log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)


def merge_sinks(into: AttentionTile, sinks: Tensor) -> None:
    """Add a key without a value to each softmax, with score ``sinks`` [H], in place."""
    total = torch.logaddexp(into.log_sum_exp, sinks.to(into.log_sum_exp.dtype)[:, None])
    into.out.mul_((into.log_sum_exp - total).exp_().unsqueeze(-1))
    into.log_sum_exp.copy_(total)


def sink_gradient(grad: Tensor, sinks: Tensor, whole: AttentionTile) -> Tensor:
    """Return the gradient of ``sinks`` [H], from that of the output, [B, H, S, K]."""
    weights = (sinks.to(whole.log_sum_exp.dtype)[:, None] - whole.log_sum_exp).exp_()
    drift = (grad.to(weights.dtype) * whole.out).sum(-1)
    return -(weights * drift).sum((0, 2)).to(sinks.dtype)
