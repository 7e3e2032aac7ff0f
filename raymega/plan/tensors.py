"""The table of a model's global tensors: name, shape, where it lives, how tp cuts it, its start.

One table serves construction, initialisation, counting, checkpoints and export; it holds no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

from raymega.config.schema import ModelSection
from raymega.messages import Box
from raymega.plan.grid import ExpertPlace
from raymega.plan.stages import Stage

Role = Literal["embedding", "head", "matrix", "norm", "bias", "state"]


WHOLE_EXPERTS = ExpertPlace()
"""The place of a rank that holds all experts whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """One named tensor of the whole model.

    Attributes:
        name: Such as ``layers.3.attention.q.weight``.
        shape: Global shape; a linear weight is [out, in].
        tp_dim: Dim that tensor parallelism cuts evenly, or -1 when every tp rank holds all of it.
        init: ``normal``, ``zeros`` or ``ones``.
        init_std: Standard deviation when ``init`` is ``normal``.
        role: What it is to the optimizer; ``matrix`` is every weight inside a block, ``embedding``
            a table, a tied head's included; ``state`` is no weight: it has no gradient, and is saved
            and restored beside the weights.
        tp_units: Blocks into which tp may cut it at most, 0 for no limit; with more ranks,
            neighbours share a block. Key and value heads.
        serves_heads: It is used on the query heads of each tp rank apart, so the gradients of ranks
            that share a block are terms of a sum.
        serves_tokens: It is used on each tp rank's own tokens, whether or not the stream is cut
            between layers, so that its gradients are terms of a sum just so.
        padded_rows: So many of its last rows are zero for ever and stand for nothing.
        etp_dim: Of an expert tensor, whose dim 0 are the experts that ep cuts evenly: the dim of the
            experts' features, which etp cuts; -1 of all others.
        is_wide: It is kept in float32 or better, whatever the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int
    init: str
    init_std: float
    role: Role
    tp_units: int = 0
    serves_heads: bool = False
    serves_tokens: bool = False
    padded_rows: int = 0
    etp_dim: int = -1
    is_wide: bool = False

    @property
    def is_expert(self) -> bool:
        """Its parts lie on the experts' view of the grid."""
        return self.etp_dim >= 0

    @property
    def is_trained(self) -> bool:
        """The optimizer updates it, and keeps moments of it."""
        return self.role != "state"

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """Elements that can be trained: all but padding."""
        return self.num_elements // self.shape[0] * self.real_rows

    @property
    def real_rows(self) -> int:
        """Rows that are no padding."""
        return self.shape[0] - self.padded_rows

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box(offset=(0,) * len(self.shape), shape=self.shape)

    def sharers(self, *, tp: int) -> int:
        """How many neighbouring tensor-parallel ranks hold the same block; an expert's know no tp."""
        if self.is_expert:
            return 1
        if self.tp_dim < 0:
            return tp
        return max(1, tp // self.tp_units) if self.tp_units else 1

    def box(self, *, tp: int, tp_rank: int, experts: ExpertPlace = WHOLE_EXPERTS) -> Box:
        """The block that a rank holds, by its place on tp or, of an expert tensor, among the experts."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        if self.is_expert:
            shape[0] //= experts.ep
            shape[self.etp_dim] //= experts.etp
            offset[0] = shape[0] * experts.ep_rank
            offset[self.etp_dim] = shape[self.etp_dim] * experts.etp_rank
        if self.tp_dim >= 0:
            sharers = self.sharers(tp=tp)
            shape[self.tp_dim] //= tp // sharers
            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)
        return Box(offset=tuple(offset), shape=tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTensors:
    """Which tensors a family has beside those that all have.

    Attributes:
        biased: Linear layers with a bias.
        has_positions: It has a table of learned positions.
        has_gate: The feed-forward layer has a gate.
        has_norm_bias: Norms have a bias.
        has_head_norms: Each query and key head has a norm, whose weight all heads share.
    """

    biased: frozenset[str] = frozenset()
    has_positions: bool = False
    has_gate: bool = True
    has_norm_bias: bool = False
    has_head_norms: bool = False


_QKV = ("attention.q", "attention.k", "attention.v")
FAMILY_TENSORS = {
    "gpt2": FamilyTensors(
        biased=frozenset((*_QKV, "attention.out", "mlp.up", "mlp.down")),
        has_positions=True,
        has_gate=False,
        has_norm_bias=True,
    ),
    "llama": FamilyTensors(),
    "qwen2": FamilyTensors(biased=frozenset(_QKV)),
    "qwen3": FamilyTensors(has_head_norms=True),
}


def _weight(
    name: str,
    shape: tuple[int, int],
    *,
    tp_dim: int,
    std: float,
    role: Role = "matrix",
    kv_heads: int = 0,
) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.weight", shape=shape, tp_dim=tp_dim, init="normal", init_std=std,
        role=role, tp_units=kv_heads, serves_heads=kv_heads > 0,
    )  # fmt: skip


def _table(name: str, model: ModelSection, *, role: Role) -> GlobalTensor:
    """A row a token, padded so that how many there are does not depend on the layout."""
    rows = model.table_rows
    return GlobalTensor(
        name=f"{name}.weight", shape=(rows, model.width), tp_dim=0, init="normal",
        init_std=model.init_std, role=role, padded_rows=rows - model.vocab_size,
    )  # fmt: skip


def _bias(name: str, size: int, *, tp_dim: int, kv_heads: int = 0) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.bias", shape=(size,), tp_dim=tp_dim, init="zeros", init_std=0.0,
        role="bias", tp_units=kv_heads, serves_heads=kv_heads > 0,
    )  # fmt: skip


def _scale(name: str, size: int, *, serves_heads: bool = False) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.weight", shape=(size,), tp_dim=-1, init="ones", init_std=0.0,
        role="norm", serves_heads=serves_heads,
    )  # fmt: skip


def _norm(name: str, model: ModelSection) -> list[GlobalTensor]:
    table = [_scale(name, model.width)]
    if FAMILY_TENSORS[model.family].has_norm_bias:
        table.append(_bias(name, model.width, tp_dim=-1))
    return table


def embedding_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Token table, and gpt2's position table."""
    table = [_table("embedding.tokens", model, role="embedding")]
    if FAMILY_TENSORS[model.family].has_positions:
        shape = (model.max_positions, model.width)
        std = model.init_std
        table.append(_weight("embedding.positions", shape, tp_dim=-1, std=std, role="embedding"))
    return table


def layer_tensors(model: ModelSection, layer: int) -> list[GlobalTensor]:
    """Tensors of one transformer block."""
    at, family = f"layers.{layer}", FAMILY_TENSORS[model.family]
    std, out_std = model.init_std, model.init_std / sqrt(2 * model.num_layers)
    q_width = model.num_heads * model.head_width
    kv_width = model.kv_heads * model.head_width
    columns = {"attention.q": q_width, "attention.k": kv_width, "attention.v": kv_width}
    if family.has_gate:
        columns["mlp.gate"] = model.ffn_width
    columns["mlp.up"] = model.ffn_width
    rows = {"attention.out": q_width, "mlp.down": model.ffn_width}
    table = _norm(f"{at}.attention_norm", model) + _norm(f"{at}.mlp_norm", model)
    if family.has_head_norms:
        for name in ("attention.q_norm", "attention.k_norm"):
            table.append(_scale(f"{at}.{name}", model.head_width, serves_heads=True))
    for name, out in columns.items():
        kv_heads = model.kv_heads if name in ("attention.k", "attention.v") else 0
        shape = (out, model.width)
        table.append(_weight(f"{at}.{name}", shape, tp_dim=0, std=std, kv_heads=kv_heads))
        if name in family.biased:
            table.append(_bias(f"{at}.{name}", out, tp_dim=0, kv_heads=kv_heads))
    for name, inner in rows.items():
        table.append(_weight(f"{at}.{name}", (model.width, inner), tp_dim=1, std=out_std))
        if name in family.biased:
            table.append(_bias(f"{at}.{name}", model.width, tp_dim=-1))
    return table


def head_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Final norm, and the head's own weight when it is not tied."""
    table = _norm("final_norm", model)
    if not model.is_embedding_tied:
        table.append(_table("head", model, role="head"))
    return table


def model_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Every global tensor once, in layer order."""
    table = embedding_tensors(model)
    for layer in range(model.num_layers):
        table += layer_tensors(model, layer)
    return table + head_tensors(model)


def stage_tensors(model: ModelSection, stage: Stage) -> list[GlobalTensor]:
    """Global tensors that a rank of ``stage`` holds (a block of), a tied copy included."""
    table = embedding_tensors(model) if stage.is_first else []
    for layer in stage.layers:
        table += layer_tensors(model, layer)
    if stage.is_last:
        table += head_tensors(model)
        if model.is_embedding_tied and not stage.are_ends_together:
            table.append(embedding_tensors(model)[0])
    return table


def loss_cost(model: ModelSection) -> float:
    """Multiplications of the head for each one of a layer; attention's scores are left out."""
    layer = sum(t.num_elements for t in layer_tensors(model, 0) if len(t.shape) == 2)
    return embedding_tensors(model)[0].num_elements / layer
