"""List the tensors of a norm of the residual stream, of the kind that the model's family names."""

from __future__ import annotations

from raymega.config.schema import ModelSection
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import GlobalTensor


def norm_tensors(name: str, model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of the norm ``name``, which every tensor-parallel rank holds whole."""
    return [
        GlobalTensor(
            name=f"{name}.{part}", shape=(1 if tensor.is_scalar else model.hidden_size,), tp_dim=-1,
            init=tensor.init, initializer_range=0.0, role="bias" if part == "bias" else "norm",
        )
        for part, tensor in parts_of(model).norm_kind.tensors.items()
    ]  # fmt: skip
