"""Decide which tensors a job trains: LoRA's adapters, and frozen weights.

`tensor_table.py` applies it to its tables, so that parameters, buckets, planner and checkpoints agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from raymega.config.schema import ModelSection
from raymega.plan.layers.base_blocks import COMPUTE, BlockTensor, is_in_blocks

LORA_A, LORA_B = ".lora_a.weight", ".lora_b.weight"
"""Ends of the names of an adapter's factors, A [r, in] and B [out, r], after the name of the linear layer."""
MAGNITUDE = ".lora_magnitude.weight"
"""End of the name of DoRA's magnitudes [out], one for each row of the layer's weight."""
NO_LINEARS = (".router.weight", ".shared_gate.weight")
"""Ends of the names of matrices that no linear layer of a block multiplies."""
FUSED = (
    ("attention.q", "attention.k", "attention.v", "attention.gate"),
    *(
        tuple(f"linear_attention.{name}" for name in names.split())
        for names in ("q k v z b a", "z x B C dt", "q_conv k_conv v_conv", "x_conv B_conv C_conv")
    ),
    ("mlp.gate", "mlp.up"),
    ("moe.shared.gate", "moe.shared.up"),
    ("moe.experts.gate", "moe.experts.up"),
    ("attention.q_down", "attention.kv_down"),
    ("cross_attention.k", "cross_attention.v"),
)
"""Linear layers that are parts of one parameter."""


class TableTensor(BlockTensor, Protocol):
    """The interface of a tensor of `layers/global_tensor.py`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def tp_dim(self) -> int:
        """Dim that tensor parallelism cuts, or -1."""

    @property
    def is_expert(self) -> bool:
        """True for a tensor of all experts."""


Tensor = TypeVar("Tensor", bound=TableTensor)


def is_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an adapter: LoRA's factors and DoRA's magnitudes."""
    return name.endswith((LORA_A, LORA_B, MAGNITUDE))


def adapter_names(linear: str) -> tuple[str, str]:
    """Return the names of A and B of the linear layer ``linear``, such as ``layers.0.attention.q``."""
    return linear + LORA_A, linear + LORA_B


def magnitude_name(linear: str) -> str:
    """Return the name of DoRA's magnitudes of the linear layer ``linear``."""
    return linear + MAGNITUDE


def linear_of(adapter: str) -> str:
    """Return the name of the weight that the adapter's tensor ``adapter`` belongs to."""
    return adapter.removesuffix(LORA_A).removesuffix(LORA_B).removesuffix(MAGNITUDE) + ".weight"


def with_tuning(table: Iterable[Tensor], model: ModelSection) -> list[Tensor]:
    """Return the tensors, each with its adapter behind it, and marked as frozen where no update reaches it."""
    found = []
    for tensor in table:
        is_frozen = tensor.role != "state" and not _is_trained(tensor.name, model)
        found.append(_frozen(tensor, model) if is_frozen else tensor)
        found += _adapter(tensor, model) if is_target(tensor, model) else []
    return found


def is_target(tensor: TableTensor, model: ModelSection) -> bool:
    """Return whether a weight of a block gets an adapter."""
    name, lora = tensor.name, model.lora
    # adapters are of the language model's blocks: PEFT's names would fit a vision tower's too, and a head's are of
    # pairs' states, which have no keys for dropout
    if not lora.r or name.startswith(("head.", "vision.")):
        return False
    if tensor.role != "matrix" or tensor.is_carried or name.endswith(NO_LINEARS) or "." not in name:
        return False
    linear = name.removesuffix(".weight")
    return any(
        fnmatchcase(linear, pattern) or fnmatchcase(linear, f"layers.*.{pattern}")
        for pattern in lora.target_modules
    )


def tuned_kind(model: ModelSection, layer: int) -> tuple[object, ...]:
    """Return what of a layer's number decides which of its tensors are trained; equal for layers that are alike."""
    patterns = (*model.freeze, *model.train, *(model.lora.target_modules if model.lora.r else ()))
    own = [pattern for pattern in patterns if pattern.startswith(("layers.", "*", "?", "["))]
    return tuple(_meets(pattern, layer) for pattern in own)


def _meets(pattern: str, layer: int) -> bool | int:
    """Return whether some tensor of a layer may fit a pattern: its first two parts do.

    Where * stands for several parts, a digit behind it may be a layer's: then no two layers are alike.
    """
    start = ".".join(pattern.split(".")[:2])
    if "*" not in start.split(".")[0]:
        return fnmatchcase(f"layers.{layer}", start)
    return layer if set(pattern) & set("0123456789?[") else True


def _is_trained(name: str, model: ModelSection) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in model.train):
        return True
    # beside adapters a new head is trained whole, as PEFT does
    if model.lora.r and _is_of_new_head(name, model):
        return True
    return not (model.lora.r or any(fnmatchcase(name, pattern) for pattern in model.freeze))


def _is_of_new_head(name: str, model: ModelSection) -> bool:
    return model.head.is_on and name.startswith("head.")


def _frozen(tensor: Tensor, model: ModelSection) -> Tensor:
    """Return the tensor as a frozen one, held as codes where the base is in blocks."""
    base_dtype = model.lora.base_dtype if model.lora.r else COMPUTE
    held = base_dtype if is_in_blocks(tensor, base_dtype) else COMPUTE
    return replace(tensor, is_frozen=True, base_dtype=held)


def _adapter(tensor: Tensor, model: ModelSection) -> list[Tensor]:
    """Return A [r, in] and B [out, r] of a weight [out, in], and DoRA's magnitudes [out].

    Experts' have the experts as dim 0. The side that W's cut leaves whole is whole in the factor too. A starts
    with the variance of PEFT's uniform values, 1 / (3 in), B at zero, and magnitudes as the norms of W's rows.
    """
    *experts, out, inner = tensor.shape
    a, b = adapter_names(tensor.name.removesuffix(".weight"))
    normal: Literal["normal"] = "normal"
    rank = model.lora.r
    cut = tensor.tp_dim
    first = replace(
        tensor, name=a, shape=(*experts, rank, inner), init=normal, is_frozen=False, base_dtype=COMPUTE,
        initializer_range=1 / sqrt(3 * inner), tp_dim=cut if cut == 1 else -1, tp_units=0,
        serves_heads=False,
    )  # fmt: skip
    second = replace(
        tensor, name=b, shape=(*experts, out, rank), init="zeros", is_frozen=False, base_dtype=COMPUTE,
        initializer_range=0.0, tp_dim=cut if cut == 0 else -1,
    )  # fmt: skip
    if tensor.is_expert:
        # etp is 1 with adapters on experts; the dim only marks them as experts'.
        first, second = replace(first, etp_dim=1), replace(second, etp_dim=1)
    if not model.lora.use_dora:
        return [first, second]
    # in float32 or better: a factor near 1, rounded to bfloat16, would change every output
    magnitude = replace(
        second, name=magnitude_name(tensor.name.removesuffix(".weight")), shape=(*experts, out),
        init="row_norms", rows_of=tensor, role="norm", is_wide=True,
    )  # fmt: skip
    return [first, second, magnitude]
