"""LoRA's adapters of routed experts, on rows sorted by expert; each expert has factors of its own."""

from __future__ import annotations

from torch import Tensor, nn

from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.expert_parallel.grouped_gemm import GroupSizes, grouped_linear
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.plan.adapters import adapter_names


class ExpertAdapter(nn.Module):
    """Adapters of one projection of the local experts: A [E/ep, r, in], B [E/ep, out, r]."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        a, b = adapter_names(name)
        self.a: ShardedParameter = factory.make(a)
        self.b: ShardedParameter = factory.make(b)
        self.settings, self.grad_queue = factory.adapters, factory.grad_queue
        self.rank: int = self.a.shape[1]

    def forward(self, rows: Tensor, y: Tensor, sizes: GroupSizes) -> Tensor:
        """Return y [R, out] with scale B A x added, of each row x [R, in] by its expert."""
        if self.settings.is_off:
            return y
        inner = grouped_linear(rows, self.a, sizes, self.grad_queue)
        return y + grouped_linear(inner * self.settings.scale, self.b, sizes, self.grad_queue)


def make_expert_adapter(factory: ParameterFactory, name: str) -> ExpertAdapter | None:
    """Return the adapters of the projection ``name``; None where it has none."""
    return ExpertAdapter(factory, name) if adapter_names(name)[0] in factory.table else None
