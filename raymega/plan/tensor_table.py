"""Define the table of a model's global tensors: name, shape, role, cut by tp, and initial values.

One table serves construction, initialisation, counting, checkpoints and export; it holds no data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

from raymega.config.schema import ModelSection
from raymega.messages import Box
from raymega.plan.grid import ExpertPlace
from raymega.plan.stages import Stage

Role = Literal["embedding", "head", "matrix", "norm", "bias", "state"]


WHOLE_EXPERTS = ExpertPlace()
"""Place of a rank that holds all experts whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """Named tensor of the whole model.

    Attributes:
        name: Name of the tensor, such as ``layers.3.attention.q.weight``.
        shape: Global shape; a linear weight is [out, in].
        tp_dim: Dim that tensor parallelism cuts evenly, or -1 when every tp rank holds all of it.
        init: Kind of initial values: ``normal``, ``zeros`` or ``ones``.
        initializer_range: Standard deviation when ``init`` is ``normal``.
        role: Role for the optimizer; ``matrix`` is every weight inside a block, ``embedding`` a
            table, a tied head's included; ``state`` is no weight: it has no gradient, and is saved
            and restored with the weights.
        tp_units: Most blocks into which tp may cut it, 0 for no limit; with more ranks, neighbours
            share a block. Key and value heads have such a limit.
        serves_heads: Whether it is used on the query heads of each tp rank apart, so that the
            gradients of ranks that share a block are terms of a sum.
        serves_tokens: Whether it is used on each tp rank's own tokens, even where the stream is not
            cut between layers, so that its gradients are terms of a sum as well.
        padded_rows: Number of its last rows that are padding and always zero.
        etp_dim: Dim of the features of an expert tensor, which etp cuts; -1 of all others. Dim 0 of
            an expert tensor is the experts, which ep cuts evenly.
        is_wide: Whether it is kept in float32 or better, whatever the compute dtype.
        layer: Number of its block, from 0; -1 outside of blocks.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int
    init: str
    initializer_range: float
    role: Role
    tp_units: int = 0
    serves_heads: bool = False
    serves_tokens: bool = False
    padded_rows: int = 0
    etp_dim: int = -1
    is_wide: bool = False
    layer: int = -1

    @property
    def is_expert(self) -> bool:
        """True where its parts are placed by the experts' view of the grid."""
        return self.etp_dim >= 0

    @property
    def is_trained(self) -> bool:
        """True where the optimizer updates it, and keeps moments of it."""
        return self.role != "state"

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """Number of elements that can be trained: all but padding, and none of a state."""
        return self.num_elements // self.shape[0] * self.real_rows if self.is_trained else 0

    @property
    def real_rows(self) -> int:
        """Number of rows that are no padding."""
        return self.shape[0] - self.padded_rows

    @property
    def whole(self) -> Box:
        """Box of the whole tensor."""
        return Box.whole(self.shape)

    def sharers(self, *, tp: int) -> int:
        """Return how many neighbouring tp ranks hold the same block; 1 for an expert tensor."""
        if self.is_expert:
            return 1
        if self.tp_dim < 0:
            return tp
        return max(1, tp // self.tp_units) if self.tp_units else 1

    def box(self, *, tp: int, tp_rank: int, experts: ExpertPlace = WHOLE_EXPERTS) -> Box:
        """Return the block of a rank, by its place on tp or, of an expert tensor, among experts."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        # experts over ep, features over etp
        if self.is_expert:
            shape[0] //= experts.ep
            shape[self.etp_dim] //= experts.etp
            offset[0] = shape[0] * experts.ep_rank
            offset[self.etp_dim] = shape[self.etp_dim] * experts.etp_rank
        # tp, with neighbours that share a key or value head
        if self.tp_dim >= 0:
            sharers = self.sharers(tp=tp)
            shape[self.tp_dim] //= tp // sharers
            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)
        return Box(offset=tuple(offset), shape=tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTensors:
    """Tensors of a family in addition to those that all families have.

    Attributes:
        biased: Names of linear layers with a bias.
        has_positions: Whether it has a table of learned positions.
        has_gate: Whether the feed-forward layer has a gate.
        has_norm_bias: Whether norms have a bias.
        has_head_norms: Whether each query and key head has a norm, whose weight all heads share.
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
        name=f"{name}.weight", shape=shape, tp_dim=tp_dim, init="normal", initializer_range=std,
        role=role, tp_units=kv_heads, serves_heads=kv_heads > 0,
    )  # fmt: skip


def _table(name: str, model: ModelSection, *, role: Role) -> GlobalTensor:
    """Return a table with a row for each token, padded to a number that no layout changes."""
    rows = model.table_rows
    return GlobalTensor(
        name=f"{name}.weight", shape=(rows, model.hidden_size), tp_dim=0, init="normal",
        initializer_range=model.initializer_range, role=role, padded_rows=rows - model.vocab_size,
    )  # fmt: skip


def _bias(name: str, size: int, *, tp_dim: int, kv_heads: int = 0) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.bias", shape=(size,), tp_dim=tp_dim, init="zeros", initializer_range=0.0,
        role="bias", tp_units=kv_heads, serves_heads=kv_heads > 0,
    )  # fmt: skip


def _scale(name: str, size: int, *, serves_heads: bool = False) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.weight", shape=(size,), tp_dim=-1, init="ones", initializer_range=0.0,
        role="norm", serves_heads=serves_heads,
    )  # fmt: skip


def _norm(name: str, model: ModelSection) -> list[GlobalTensor]:
    table = [_scale(name, model.hidden_size)]
    if FAMILY_TENSORS[model.family].has_norm_bias:
        table.append(_bias(name, model.hidden_size, tp_dim=-1))
    return table


def embedding_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the token table, and gpt2's position table."""
    table = [_table("embedding.tokens", model, role="embedding")]
    if FAMILY_TENSORS[model.family].has_positions:
        shape = (model.max_positions, model.hidden_size)
        std = model.initializer_range
        table.append(_weight("embedding.positions", shape, tp_dim=-1, std=std, role="embedding"))
    return table


def _attention_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors that make heads of the stream, and the projection back to it."""
    family, std = FAMILY_TENSORS[model.family], model.initializer_range
    q_width, kv_width = model.num_heads * model.head_width, model.kv_heads * model.head_width
    table = []
    if family.has_head_norms:
        for name in ("q_norm", "k_norm"):
            table.append(_scale(f"{at}.{name}", model.head_width, serves_heads=True))
    for name, out in {"q": q_width, "k": kv_width, "v": kv_width}.items():
        kv_heads = 0 if name == "q" else model.kv_heads
        shape = (out, model.hidden_size)
        table.append(_weight(f"{at}.{name}", shape, tp_dim=0, std=std, kv_heads=kv_heads))
        if f"attention.{name}" in family.biased:
            table.append(_bias(f"{at}.{name}", out, tp_dim=0, kv_heads=kv_heads))
    return table + _row_linear(f"{at}.out", q_width, model, "attention.out")


def _latent_attention_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of latent attention: latents whole on every rank, heads of them cut."""
    mla, std, table = model.mla, model.initializer_range, []
    q_width = model.num_heads * model.head_width
    kv_width = model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    kv_latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    # queries: through a latent, or directly
    if mla.q_lora_rank:
        table += [
            _weight(f"{at}.q_down", (mla.q_lora_rank, model.hidden_size), tp_dim=-1, std=std),
            _scale(f"{at}.q_latent_norm", mla.q_lora_rank),
            _weight(f"{at}.q_up", (q_width, mla.q_lora_rank), tp_dim=0, std=std),
        ]
    else:
        table.append(_weight(f"{at}.q", (q_width, model.hidden_size), tp_dim=0, std=std))
    table += [
        _weight(f"{at}.kv_down", (kv_latent, model.hidden_size), tp_dim=-1, std=std),
        _scale(f"{at}.kv_latent_norm", mla.kv_lora_rank),
        _weight(f"{at}.kv_up", (kv_width, mla.kv_lora_rank), tp_dim=0, std=std),
    ]
    # output projection, over the heads' values
    values = model.num_heads * mla.v_head_dim
    return table + _row_linear(f"{at}.out", values, model, "attention.out")


def _row_linear(at: str, inner: int, model: ModelSection, kind: str) -> list[GlobalTensor]:
    """Return the tensors of a linear layer that writes to the residual stream."""
    table = [_weight(at, (model.hidden_size, inner), tp_dim=1, std=_out_std(model))]
    if kind in FAMILY_TENSORS[model.family].biased:
        table.append(_bias(at, model.hidden_size, tp_dim=-1))
    return table


def _out_std(model: ModelSection) -> float:
    return model.initializer_range / sqrt(2 * model.num_layers)


def _mlp_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    family, table = FAMILY_TENSORS[model.family], []
    for name in ("gate", "up") if family.has_gate else ("up",):
        shape = (model.ffn_hidden_size, model.hidden_size)
        table.append(_weight(f"{at}.{name}", shape, tp_dim=0, std=model.initializer_range))
        if f"mlp.{name}" in family.biased:
            table.append(_bias(f"{at}.{name}", model.ffn_hidden_size, tp_dim=0))
    return table + _row_linear(f"{at}.down", model.ffn_hidden_size, model, "mlp.down")


def _moe_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return router, experts and the shared expert, which attention's tp cuts, all without biases."""
    moe, width = model.moe, model.hidden_size
    names = ("gate", "up") if FAMILY_TENSORS[model.family].has_gate else ("up",)
    # Router, with the state that balances it.
    router = _weight(
        f"{at}.router", (moe.num_experts, width), tp_dim=-1, std=model.initializer_range
    )
    table = [replace(router, serves_tokens=True, is_wide=True)]
    if moe.expert_bias:
        table.append(_router_state(f"{at}.router.bias", moe.num_experts))
    if moe.load_balancing_type == "global":
        table.append(_router_state(f"{at}.router.counts", moe.num_experts))
    # Experts: dim 0 is the expert.
    into = (moe.num_experts, model.expert_width, width)
    back = (moe.num_experts, width, model.expert_width)
    table += [
        _expert(f"{at}.experts.{n}", into, etp_dim=1, std=model.initializer_range) for n in names
    ]
    table.append(_expert(f"{at}.experts.down", back, etp_dim=2, std=_out_std(model)))
    # Shared expert, which tp cuts as a dense layer.
    if moe.shared_expert_intermediate_size:
        shape = (moe.shared_expert_intermediate_size, width)
        table += [
            _weight(f"{at}.shared.{n}", shape, tp_dim=0, std=model.initializer_range) for n in names
        ]
        table.append(_weight(f"{at}.shared.down", shape[::-1], tp_dim=1, std=_out_std(model)))
    if moe.shared_expert_gate:
        table.append(
            _weight(f"{at}.shared_gate", (1, width), tp_dim=-1, std=model.initializer_range)
        )
    return table


def _expert(name: str, shape: tuple[int, int, int], *, etp_dim: int, std: float) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.weight", shape=shape, tp_dim=-1, init="normal", initializer_range=std, role="matrix",
        etp_dim=etp_dim,
    )  # fmt: skip


def _router_state(name: str, num_experts: int) -> GlobalTensor:
    """Return a tensor that routing uses and that no gradient moves; zero at the start."""
    return GlobalTensor(
        name=name, shape=(num_experts,), tp_dim=-1, init="zeros", initializer_range=0.0, role="state",
        is_wide=True,
    )  # fmt: skip


def block_name(model: ModelSection, layer: int) -> str:
    """Return the begin of the names of block ``layer``'s tensors.

    Blocks after the model's last one are those of multi-token prediction.
    """
    further = layer - model.num_layers
    return f"layers.{layer}" if further < 0 else f"mtp.{further}"


def layer_tensors(model: ModelSection, layer: int) -> list[GlobalTensor]:
    """Return the tensors of one transformer block."""
    at = block_name(model, layer)
    make_attention = _latent_attention_tensors if model.mla.kv_lora_rank else _attention_tensors
    norms = _norm(f"{at}.attention_norm", model) + _norm(f"{at}.mlp_norm", model)
    attention = make_attention(f"{at}.attention", model)
    if model.moe.holds_experts(layer):
        table = norms + attention + _moe_tensors(f"{at}.moe", model)
    else:
        table = norms + attention + _mlp_tensors(f"{at}.mlp", model)
    return [replace(_scaled(tensor, model), layer=layer) for tensor in table]


def _scaled(tensor: GlobalTensor, model: ModelSection) -> GlobalTensor:
    """Return the tensor with muP's initial values.

    A matrix inside a block starts with a variance that falls as what it sums over grows.
    """
    if tensor.role != "matrix":
        return tensor
    return replace(tensor, initializer_range=tensor.initializer_range / sqrt(model.width_ratio))


def head_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the final norm, and the head's own weight when it is not tied."""
    table = _norm("final_norm", model)
    if not model.tie_word_embeddings:
        table.append(_table("head", model, role="head"))
    return table


def mtp_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of multi-token prediction: a join, a block and a last norm a depth."""
    table = []
    for depth in range(model.num_nextn_predict_layers):
        layer = model.num_layers + depth
        at = block_name(model, layer)
        shape = (model.hidden_size, 2 * model.hidden_size)
        table += _norm(f"{at}.token_norm", model) + _norm(f"{at}.hidden_norm", model)
        join = _weight(f"{at}.join", shape, tp_dim=-1, std=model.initializer_range)
        table.append(_scaled(join, model))
        table += layer_tensors(model, layer) + _norm(f"{at}.final_norm", model)
    return table


def model_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return every global tensor once, in layer order."""
    table = embedding_tensors(model)
    for layer in range(model.num_layers):
        table += layer_tensors(model, layer)
    return table + head_tensors(model) + mtp_tensors(model)


def stage_tensors(model: ModelSection, stage: Stage) -> list[GlobalTensor]:
    """Return the global tensors that a rank of ``stage`` holds (a block of), a tied copy included."""
    table = embedding_tensors(model) if stage.is_first else []
    for layer in stage.layers:
        table += layer_tensors(model, layer)
    if stage.is_last:
        table += head_tensors(model) + mtp_tensors(model)
        if model.needs_token_table_last and not stage.are_ends_together:
            table.append(embedding_tensors(model)[0])
    return table
