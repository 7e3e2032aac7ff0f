"""LoRA's adapters of routed experts, on rows sorted by expert; each expert has factors of its own."""

from __future__ import annotations

from torch import Tensor, nn

from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.expert_parallel.grouped_gemm import GroupSizes, grouped_linear
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.magnitudes import rescaled, row_norms
from raymega.plan.adapters import adapter_names, magnitude_name


class ExpertAdapter(nn.Module):
    """Adapters of one projection of the local experts: A [E/ep, r, in], B [E/ep, out, r]."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        a, b = adapter_names(name)
        self.a: ShardedParameter = factory.make(a)
        self.b: ShardedParameter = factory.make(b)
        self.magnitude = factory.make_if_any(magnitude_name(name))
        self.settings, self.grad_queue = factory.adapters, factory.grad_queue
        self.rank: int = self.a.shape[1]

    def forward(self, rows: Tensor, y: Tensor, sizes: GroupSizes, weight: Tensor) -> Tensor:
        """Return y [R, out] with scale B A x added, of each row x [R, in] by its expert.

        DoRA rescales the sum, by the norms that ``weight`` [E/ep, out, in] and the factors give. No bias is in y.
        """
        if self.settings.is_off:
            return y
        scale = self.settings.scale
        inner = grouped_linear(rows, self.a, sizes, self.grad_queue)
        y = y + grouped_linear(inner * scale, self.b, sizes, self.grad_queue)
        if self.magnitude is None:
            return y
        norms = row_norms(weight.detach(), self.a, self.b, scale, None)
        return rescaled(y, self.magnitude, norms, counts=sizes.counts)


def make_expert_adapter(factory: ParameterFactory, name: str) -> ExpertAdapter | None:
    """Return the adapters of the projection ``name``; None where it has none."""
    return ExpertAdapter(factory, name) if adapter_names(name)[0] in factory.table else None
