"""Layer with a state of fixed size a head in place of attention, with heads sharded over the tensor-parallel ranks.

A rank holds some of the groups of heads, with their channels of the convolution. Context-parallel ranks
exchange their tokens of all its groups for all tokens of some, so that a state never travels. What a state
is, and how it is normalised and gated, is in `gated_delta_net.py` and `mamba2.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
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


class StateLayer(nn.Module, ABC):
    """Projections, states between them, norm and gate.

    Backward always recomputes states, norm and gate: the projections and what is read of the states are kept.
    With ``is_remade`` the projections alone are.

    Attributes:
        num_groups: Number of this rank's groups of heads, h.
        ratio: Number of value heads of a group, r.
        widths: Features of a group that the convolution mixes, by projection.
    """

    is_remade = False

    def __init__(
        self,
        factory: ParameterFactory,
        name: str,
        model: ModelSection,
        projections: Mapping[str, int],
        *,
        convolved: tuple[str, ...],
    ) -> None:
        """Make the layer of ``projections``, by the features of a group; ``z`` is the gate."""
        super().__init__()
        sizes = model.linear_attention
        self.num_groups = sizes.num_key_heads // factory.tp.size
        self.ratio = sizes.num_value_heads // sizes.num_key_heads
        self.widths = [projections[part] for part in convolved]
        self.parts = tuple(projections)
        self.sizes = [self.num_groups * width for width in projections.values()]
        self.into = ColumnParallelLinear(factory, *(f"{name}.{part}" for part in projections))
        self.filters = factory.make(*(f"{name}.{part}_conv.weight" for part in convolved))
        self.decay_log = factory.make(f"{name}.A_log")
        self.step_bias = factory.make(f"{name}.dt_bias")
        self.out = RowParallelLinear(factory, f"{name}.out")

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout each row is one document on this rank."""
        mixed = recompute_input(self.into, x)
        if token_layout is None:
            token_layout = make_token_layout(whole_rows(len(mixed), mixed.device), no_context())
        if self.is_remade:
            inside = partial(self._read, token_layout=token_layout, keep=_plainly)
            params = (*self.state_weights, *self.norm_weights)
            return recompute_input(self.out, checkpoint_output(inside, mixed, params=params))
        y = self._read(mixed, token_layout=token_layout, keep=checkpoint_output)
        return recompute_input(self.out, y)

    @property
    @abstractmethod
    def state_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`run` reads."""

    @property
    @abstractmethod
    def norm_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`gated` reads."""

    @abstractmethod
    def run(self, groups: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map groups [N, B, h/cp, W] of whole rows to what they read of their states, [N, B, h/cp, r V].

        W are the features of a group's projections without its gate.
        """

    @abstractmethod
    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalise y [S/cp, B, h, r V] and multiply it by the gates z [S/cp, B, h * r V]: [S/cp, B, h * r V]."""

    def own(self, count: int, token_layout: TokenLayout) -> slice:
        """Return which ``count`` of this rank's groups it has after the exchange."""
        context = token_layout.context
        first = (context.inner.index * context.outer.size + context.outer.index) * count
        return slice(first, first + count)

    def own_filters(self, own: slice, dtype: torch.dtype) -> Tensor:
        """Return the convolution of the groups ``own``: [h/cp, channels, taps]."""
        parts = self.filters.to(dtype).split([self.num_groups * width for width in self.widths])
        by_group = [part.view(self.num_groups, -1, part.shape[-1])[own] for part in parts]
        return torch.cat(by_group, dim=1)

    def _read(self, mixed: Tensor, *, token_layout: TokenLayout, keep: Keep) -> Tensor:
        """Map the projections of this rank's h groups to gated outputs [S/cp, B, h * r V].

        Args:
            mixed: Projections, [S/cp, B, h * features of a group].
            token_layout: Layout of these tokens.
            keep: Function that runs a part of it, with or without recomputation in backward.
        """
        run = partial(self.run, token_layout=token_layout)
        z = mixed.split(self.sizes, dim=-1)[self.parts.index("z")]
        if token_layout.context.degree == 1:
            y = keep(lambda mixed: run(self._by_group(mixed)), mixed, params=self.state_weights)
        else:
            # all tokens of some groups; z is copied, or it would hold all projections a second time
            z = z.contiguous()
            groups = tokens_to_heads(self._by_group(mixed), token_layout)
            y = heads_to_tokens(keep(run, groups, params=self.state_weights), token_layout)
        return keep(self.gated, y, z, params=self.norm_weights)

    def _by_group(self, mixed: Tensor) -> Tensor:
        """Return what a state reads of the projections, by group: [S/cp, B, h, W]."""
        split = zip(self.parts, mixed.split(self.sizes, dim=-1), strict=True)
        parts = (part.unflatten(-1, (self.num_groups, -1)) for name, part in split if name != "z")
        return torch.cat(tuple(parts), dim=-1)


def _plainly(make: Callable[..., Tensor], *inputs: Tensor, params: tuple[Tensor, ...]) -> Tensor:  # noqa: ARG001
    """Return ``make(*inputs)``, where the whole is recomputed already."""
    return make(*inputs)
