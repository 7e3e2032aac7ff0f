"""Attention of encoder-decoder families: biases of relative positions, masks by document, no factor on scores.

Under context parallelism each rank keeps its queries and gathers the keys and values of all: the bias of a
pair of tokens depends on both, so no block of keys is plain attention. Raffel et al. 2020.
"""

from __future__ import annotations

from functools import partial
from math import log

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from raymega.config.schema import ModelSection
from raymega.model.attention.core_attention import WeightDropout
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.stream_places import Places
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.core.dropout import TokenKeys
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    RowParallelLinear,
)
from raymega.parallel.tensor_parallel.mappings import gather_positions


class RelativeAttention(nn.Module):
    """Attention of a stream to itself, or with ``is_cross`` to the other one, with heads cut over tp.

    With ``is_remade`` backward recomputes everything between the projections.
    """

    is_remade = False

    def __init__(
        self, factory: ParameterFactory, name: str, model: ModelSection, *, is_cross: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.is_cross = model.num_heads // factory.tp.size, is_cross
        self.weight_dropout = WeightDropout(factory, name, model)
        names = [f"{name}.{part}" for part in ("q", "k", "v")]
        self.kv: ColumnParallelLinear | None = None
        if is_cross:
            self.q = ColumnParallelLinear(factory, names[0])
            self.kv = ColumnParallelLinear(factory, *names[1:])
        else:
            self.q = ColumnParallelLinear(factory, *names)
        self.out = RowParallelLinear(factory, f"{name}.out")

    def forward(
        self,
        x: Tensor,
        read: Tensor,
        bias: Tensor,
        context: Group,
        keys: TokenKeys | None = None,
    ) -> Tensor:
        """Map x [Q/sp, B, D] to the same shape.

        Args:
            x: Stream of the queries.
            read: Stream of the keys and values, [K/sp, B, D]; x itself without ``is_cross``.
            bias: Terms of the scores, [B or 1, H/tp or 1, Q, K * cp], very negative where a key is not seen.
            context: Context-parallel ranks, which hold the other keys.
            keys: Dropout keys of the stream of the queries; None drops nothing.
        """
        # queries beside keys and values, or each of its own stream
        made = [recompute_input(self.q, x)]
        made += [self.kv(read)] if self.kv is not None else []
        attend = partial(self._attend, context=context, keys=keys)
        if not self.is_remade:
            return self.out(attend(bias, *made))
        return recompute_input(self.out, checkpoint_output(attend, bias, *made))

    def _attend(
        self, bias: Tensor, *made: Tensor, context: Group, keys: TokenKeys | None
    ) -> Tensor:
        """Return attention outputs [Q, B, H/tp * K] of q and kv [., B, h K], or of one tensor with all three."""
        q, k, v = self._heads(*made)
        k, v = gather_positions(torch.stack((k, v), 1), context).unbind(1)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        # no fused kernel has a gradient of the bias on all devices: backward keeps the weights of all pairs
        y = self.weight_dropout((q @ k.mT + bias).softmax(-1), keys) @ v
        return y.permute(2, 0, 1, 3).flatten(2)

    def _heads(self, first: Tensor, kv: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [., B, H/tp, K] each."""
        count = self.num_heads
        if kv is None:
            q, k, v = first.unflatten(-1, (3 * count, -1)).split(count, dim=2)
            return q, k, v
        k, v = kv.unflatten(-1, (2 * count, -1)).split(count, dim=2)
        return first.unflatten(-1, (count, -1)), k, v


def position_bias(table: Tensor, places: Places, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return the terms of a stream's scores by relative position, and very negative ones where a key is not seen.

    Args:
        table: Bias of each bucket and head, [buckets, H/tp].
        places: Documents and positions of the stream's tokens.
        is_causal: Whether a token sees no later ones, and has no buckets for them.
        max_distance: Distance from which all keys share the last bucket.

    Returns:
        [B or 1, H/tp, S/cp, S].
    """
    # key behind query: positive
    distance = places.key_positions[:, None, :] - places.positions[:, :, None]
    bucket = relative_bucket(
        distance, is_causal=is_causal, num_buckets=len(table), max_distance=max_distance
    )
    bias = embedding(bucket, table).permute(0, 3, 1, 2)
    hidden = places.documents[:, :, None] != places.key_documents[:, None, :]
    if is_causal:
        hidden = hidden | (distance > 0)
    return bias.masked_fill(hidden[:, None], _unseen(bias.dtype))


def document_mask(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return terms of scores, [B or 1, 1, Q, K], by the documents of queries [., Q] and keys [., K]: 0 in the same one."""
    hidden = (queries[:, :, None] != keys[:, None, :])[:, None]
    nothing = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return nothing.masked_fill_(hidden, _unseen(dtype))


def _unseen(dtype: torch.dtype) -> float:
    """Return the term of a score whose key is not seen: with any score beside it, it stays finite in ``dtype``."""
    return torch.finfo(dtype).min / 2


def relative_bucket(
    distance: Tensor, *, is_causal: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of each distance from query to key, in tokens, int64 of the same shape.

    Half of the buckets of a direction are of one distance each, the others grow with the logarithm. Without a
    causal mask keys behind the query have the second half of all buckets.
    """
    first = torch.zeros_like(distance)
    if is_causal:
        away = (-distance).clamp(min=0)
    else:
        num_buckets //= 2
        first = (distance > 0).to(torch.int64) * num_buckets
        away = distance.abs()
    exact = num_buckets // 2
    # float32 as in the published code, so that no distance changes its bucket
    share = torch.log(away.clamp(min=1).float() / exact) / log(max_distance / exact)
    wide = exact + (share * (num_buckets - exact)).to(torch.int64)
    return first + torch.where(away < exact, away, wide.clamp(max=num_buckets - 1))
