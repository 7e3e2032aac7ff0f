"""The layer of experts that some blocks have where a dense one has a feed-forward layer.

Each rank routes its own share of the micro-batch's tokens, sequence parallel or not. While tokens
travel to their experts and back, the shared expert is at work.
"""

from __future__ import annotations

from torch import Tensor, nn

from raymega.config.moe import MoeSection
from raymega.model.layers.mlp import GeluMlp, SwigluMlp
from raymega.model.moe.experts import Experts, SharedExpert
from raymega.model.moe.local_experts import is_one_node, run_local_experts
from raymega.model.moe.router import Router
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, dispatch_tokens
from raymega.parallel.expert_parallel.token_ids import TokenIds, plain_marks
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.mappings import gather_rows, scatter_rows


class MoeLayer(nn.Module):
    """Router, experts, shared expert; tensors are named ``{name}.router.weight`` and so on."""

    def __init__(
        self,
        factory: ParameterFactory,
        name: str,
        moe: MoeSection,
        groups: ExpertGroups,
        mlp: type[GeluMlp] | type[SwigluMlp] = SwigluMlp,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.router = Router(factory, f"{name}.router", moe, groups.micro)
        self.experts = Experts(factory, f"{name}.experts", groups.etp)
        self.shared = SharedExpert(factory, name, mlp) if moe.shared_width else None

    @property
    def is_remade(self) -> bool:
        """Backward makes nonlinearities again."""
        return self.experts.is_remade

    @is_remade.setter
    def is_remade(self, is_remade: bool) -> None:
        self.experts.is_remade = is_remade
        if self.shared is not None:
            self.shared.mlp.is_remade = is_remade

    def forward(self, x: Tensor, places: TokenLayout | None = None) -> Tensor:
        """x: [S/(cp*sp), B, D] -> the same; without places rows are whole and every token counts."""
        own, marks, keys = self._own_tokens(x, places)
        own, routing = self.router(own, marks, keys)
        if is_one_node(self.experts, routing, self.groups):
            y = self._stream(run_local_experts(own, routing, self.experts)).view_as(x)
            return y if self.shared is None else y + self.shared.finish(self.shared.start(x), x)
        trip = dispatch_tokens(own, routing, self.groups)
        inner = x if self.shared is None else self.shared.start(x)
        trip.start_back(self.experts(*trip.arrive()))
        shared = None if self.shared is None else self.shared.finish(inner, x)
        y = self._stream(trip.result()).view_as(x)
        return y if shared is None else y + shared

    def _own_tokens(
        self, x: Tensor, places: TokenLayout | None
    ) -> tuple[Tensor, TokenIds, Tensor | None]:
        """[T, D]: what this rank holds or, where tp ranks hold the same, its part of that."""
        stream, marks = self.groups.stream, None if places is None else places.marks
        keys = None if places is None or places.keys is None else places.keys.own
        tokens = x.flatten(0, 1)
        if not stream.is_sequence_parallel and stream.tp.size > 1:
            tokens = scatter_rows(tokens, stream.tp)
        return (
            tokens,
            marks or plain_marks(x, self.groups.micro),
            None if keys is None else stream.share(keys.flatten()),
        )

    def _stream(self, y: Tensor) -> Tensor:
        """From own tokens to what the rank holds of the stream."""
        tp = self.groups.stream.tp
        if self.groups.stream.is_sequence_parallel or tp.size == 1:
            return y
        return gather_rows(y, tp)
