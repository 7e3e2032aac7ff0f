"""Gated delta net (Yang et al. 2024, as in Qwen3-Next), with heads sharded over the tensor-parallel ranks.

A rank holds some of the key heads, with the value heads that read them and their channels of the
convolution. Context-parallel ranks exchange their tokens of all its heads for all tokens of some, so that
a state never travels: the layer has no part that is as large as a row's square. `delta_rule.py` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from raymega.config.schema import ModelSection
from raymega.model.layers.norms import Norm
from raymega.model.linear_attention.delta_rule import convolve, gated_delta_rule, normalise
from raymega.parallel.context_parallel.context import (
    TokenLayout,
    make_token_layout,
    no_context,
    whole_rows,
)
from raymega.parallel.context_parallel.ulysses import heads_to_tokens, tokens_to_heads
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    RowParallelLinear,
)

Keep = Callable[..., Tensor]


class GatedDeltaNet(nn.Module):
    """State of fixed size a head in place of attention, with a norm and a gate of what is read.

    Backward always recomputes states, norm and gate: the projections and what is read of the states are kept.
    With ``is_remade`` the projections alone are.
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str, model: ModelSection) -> None:
        super().__init__()
        sizes, tp = model.linear_attention, factory.tp.size
        self.num_heads = sizes.num_key_heads // tp
        self.ratio = sizes.num_value_heads // sizes.num_key_heads
        # features of each key head: query, key, values; then beta and decay of each value head
        values = self.ratio * sizes.value_head_dim
        self.widths = (sizes.key_head_dim, sizes.key_head_dim, values)
        parts = {"q": self.widths[0], "k": self.widths[1], "v": values, "z": values, "b": self.ratio, "a": self.ratio}  # fmt: skip
        self.sizes = [self.num_heads * width for width in parts.values()]
        self.into = ColumnParallelLinear(factory, *(f"{name}.{part}" for part in parts))
        self.filters = factory.make(*(f"{name}.{part}_conv.weight" for part in ("q", "k", "v")))
        self.decay_log = factory.make(f"{name}.A_log")
        self.step_bias = factory.make(f"{name}.dt_bias")
        self.norm = Norm(factory, f"{name}.norm", "rms_norm", model.norm_eps)
        self.out = RowParallelLinear(factory, f"{name}.out")

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout each row is one document on this rank."""
        mixed = recompute_input(self.into, x)
        if token_layout is None:
            token_layout = make_token_layout(whole_rows(len(mixed), mixed.device), no_context())
        if self.is_remade:
            inside = partial(self._read, token_layout=token_layout, keep=_plainly)
            params = (*self._weights, *self.norm.parameters())
            return recompute_input(self.out, checkpoint_output(inside, mixed, params=params))
        y = self._read(mixed, token_layout=token_layout, keep=checkpoint_output)
        return recompute_input(self.out, y)

    @property
    def _weights(self) -> tuple[Tensor, ...]:
        return self.filters, self.decay_log, self.step_bias

    def _read(self, mixed: Tensor, *, token_layout: TokenLayout, keep: Keep) -> Tensor:
        """Map the projections of this rank's h heads to gated outputs [S/cp, B, h * r V].

        Args:
            mixed: Projections, [S/cp, B, h * (2 K + 2 r V + 2 r)].
            token_layout: Layout of these tokens.
            keep: Function that runs a part of it, with or without recomputation in backward.
        """
        run = partial(self._run, token_layout=token_layout)
        z = mixed.split(self.sizes, dim=-1)[3]
        if token_layout.context.degree == 1:
            y = keep(lambda mixed: run(self._by_head(mixed)), mixed, params=self._weights)
        else:
            # all tokens of some heads; z is copied, or it would hold all projections a second time
            z = z.contiguous()
            heads = tokens_to_heads(self._by_head(mixed), token_layout)
            y = heads_to_tokens(keep(run, heads, params=self._weights), token_layout)
        return keep(self._gated, y, z, params=tuple(self.norm.parameters()))

    def _by_head(self, mixed: Tensor) -> Tensor:
        """Return what a state reads of the projections, by key head: [S/cp, B, h, 2 K + r V + 2 r]."""
        q, k, v, _, b, a = mixed.split(self.sizes, dim=-1)
        parts = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v, b, a))
        return torch.cat(tuple(parts), dim=-1)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalise each value head of y [S/cp, B, h, r V], then multiply by the gates z: [S/cp, B, h * r V]."""
        normal = self.norm(y.flatten(2).unflatten(-1, (self.num_heads * self.ratio, -1)))
        return normal.flatten(2) * silu(z)

    def _run(self, heads: Tensor, *, token_layout: TokenLayout) -> Tensor:
        """Map heads [N, B, h/cp, 2 K + r V + 2 r] of whole rows to what they read, [N, B, h/cp, r V]."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        filters, decay_log, step_bias = self._own(heads.shape[2], token_layout, wide.dtype)
        positions = token_layout.row_positions
        # convolution of queries, keys and values
        mixed, b, a = wide.split((sum(self.widths), self.ratio, self.ratio), dim=-1)
        q, k, v = silu(convolve(mixed, filters, positions)).split(self.widths, dim=-1)
        # states
        y = gated_delta_rule(
            normalise(q) * self.widths[0] ** -0.5,
            normalise(k),
            v.unflatten(-1, (self.ratio, -1)),
            decay=-decay_log.exp() * softplus(a + step_bias),
            beta=b.sigmoid(),
            positions=positions,
        )
        return y.flatten(3).to(heads.dtype)

    def _own(
        self, count: int, token_layout: TokenLayout, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of this rank's ``count`` heads: filters [h, 2 K + r V, taps], vectors [h, r]."""
        context = token_layout.context
        first = (context.inner.index * context.outer.size + context.outer.index) * count
        own = slice(first, first + count)
        parts = self.filters.to(dtype).split([self.num_heads * width for width in self.widths])
        by_head = [part.view(self.num_heads, -1, part.shape[-1])[own] for part in parts]
        vectors = (t.to(dtype).view(self.num_heads, -1)[own] for t in self._weights[1:])
        return torch.cat(by_head, dim=1), *vectors


def _plainly(make: Callable[..., Tensor], *inputs: Tensor, params: tuple[Tensor, ...]) -> Tensor:  # noqa: ARG001
    """Return ``make(*inputs)``, where the whole is recomputed already."""
    return make(*inputs)
