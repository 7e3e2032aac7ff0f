"""Define the table of a model's global tensors: name, shape, role, cut by tp, and initial values.

One table serves construction, initialisation, counting, checkpoints and export; it holds no data.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import sqrt

from raymega.config.schema import ModelSection
from raymega.plan.adapters import tuned_kind, with_tuning
from raymega.plan.layers.encoder_decoder import block_tensors, position_tables
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import BELOW, GlobalTensor, Role
from raymega.plan.layers.layer_pattern import ALONE, STATES, sized_model, tensor_kind
from raymega.plan.layers.norm_tensors import norm_tensors
from raymega.plan.layers.state_tensors import state_tensors
from raymega.plan.layers.vision import PROJECTOR, VISION, vision_tensors, without_unused
from raymega.plan.stages import Stage


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


def _offset(tensor: GlobalTensor, model: ModelSection) -> GlobalTensor:
    """Return the weight of heads' norms, which starts at 0 where the family multiplies by 1 + weight."""
    return replace(tensor, init="zeros") if parts_of(model).is_norm_offset else tensor


def embedding_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the token table, tables of positions and of token types, their sum's norm, and a vision tower."""
    table, family = [_table("embedding.tokens", model, role="embedding")], parts_of(model)
    positions = model.max_positions if family.has_positions else 0
    types = 0 if family.is_causal else model.encoder.type_vocab_size
    for name, rows in {"positions": positions, "token_types": types}.items():
        if rows:
            shape, std = (rows, model.hidden_size), model.initializer_range
            table.append(_weight(f"embedding.{name}", shape, tp_dim=-1, std=std, role="embedding"))
    if family.has_embedding_norm:
        table += norm_tensors("embedding.norm", model)
    if family.is_encoder_decoder:
        # T5's tables start wide: a tied head divides by sqrt(D)
        table = [replace(each, initializer_range=1.0) for each in table] + position_tables(model)
    below = [replace(each, layer=BELOW) for each in table + vision_tensors(model)]
    return without_unused(with_tuning(below, model), model.vision)


def is_tower_frozen(model: ModelSection) -> bool:
    """Return whether no gradient passes the vision tower: all its tensors but the projector's are frozen."""
    tower = (each for each in embedding_tensors(model) if each.name.startswith(f"{VISION}."))
    return not any(t.is_trained and not t.name.startswith(PROJECTOR) for t in tower)


def is_head_frozen(model: ModelSection) -> bool:
    """Return whether no matrix before the loss is trained: the head's own ones, or the tied token table."""
    tensors = embedding_tensors(model)[:1] if model.has_tied_head else head_tensors(model)
    return not any(each.is_trained for each in tensors if len(each.shape) > 1)


def _attention_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors that make heads of the stream, and the projection back to it."""
    family, std = parts_of(model), model.initializer_range
    q_width, kv_width = model.num_heads * model.head_width, model.kv_heads * model.head_width
    table = []
    if family.qk_norm == "heads":
        for name in ("q_norm", "k_norm"):
            scale = _scale(f"{at}.{name}", model.head_width, serves_heads=True)
            table.append(_offset(scale, model))
    if family.qk_norm == "whole":  # one weight a feature, cut as the features are
        table.append(replace(_scale(f"{at}.q_norm", q_width), tp_dim=0))
        scale = _scale(f"{at}.k_norm", kv_width, serves_heads=True)
        table.append(replace(scale, tp_dim=0, tp_units=model.kv_heads))
    if family.has_output_gate:
        shape = (q_width, model.hidden_size)
        table.append(_weight(f"{at}.gate", shape, tp_dim=0, std=std))
    if model.attention.sinks:
        table.append(_bias(f"{at}.sinks", model.num_heads, tp_dim=0))
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
    if mla.index_n_heads:
        table += _indexer_tensors(f"{at}.indexer", model)
    # output projection, over the heads' values
    values = model.num_heads * mla.v_head_dim
    return table + _row_linear(f"{at}.out", values, model, "attention.out")


def _indexer_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return the weights of DeepSeek-V3.2's indexer, which every rank holds whole and no layer reads."""
    mla, std, width = model.mla, model.initializer_range, model.hidden_size
    shapes = {
        "q_up": (mla.index_n_heads * mla.index_head_dim, mla.q_lora_rank),
        "k": (mla.index_head_dim, width),
        "head_weights": (mla.index_n_heads, width),
    }
    table = [_weight(f"{at}.{name}", shape, tp_dim=-1, std=std) for name, shape in shapes.items()]
    table += [
        _scale(f"{at}.k_norm", mla.index_head_dim),
        _bias(f"{at}.k_norm", mla.index_head_dim, tp_dim=-1),
    ]
    return [replace(each, is_frozen=True, is_carried=True) for each in table]


def _row_linear(at: str, inner: int, model: ModelSection, kind: str) -> list[GlobalTensor]:
    """Return the tensors of a linear layer that writes to the residual stream."""
    weight = _weight(at, (model.hidden_size, inner), tp_dim=1, std=_out_std(model))
    is_biased = kind in parts_of(model).biased
    return [weight, _bias(at, model.hidden_size, tp_dim=-1)] if is_biased else [weight]


def _out_std(model: ModelSection) -> float:
    return model.initializer_range / sqrt(2 * model.num_layers)


def _mlp_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    family, table = parts_of(model), []
    for name in ("gate", "up") if family.has_gate else ("up",):
        shape = (model.ffn_hidden_size, model.hidden_size)
        table.append(_weight(f"{at}.{name}", shape, tp_dim=0, std=model.initializer_range))
        if f"mlp.{name}" in family.biased:
            table.append(_bias(f"{at}.{name}", model.ffn_hidden_size, tp_dim=0))
    return table + _row_linear(f"{at}.down", model.ffn_hidden_size, model, "mlp.down")


def _moe_tensors(at: str, model: ModelSection) -> list[GlobalTensor]:
    """Return router, experts and the shared expert, which attention's tp cuts."""
    moe, width, biased = model.moe, model.hidden_size, parts_of(model).biased
    names = ("gate", "up") if parts_of(model).has_gate else ("up",)
    # Router, with the state that balances it.
    router = _weight(
        f"{at}.router", (moe.num_experts, width), tp_dim=-1, std=model.initializer_range
    )
    table = [replace(router, serves_tokens=True, is_wide=True)]
    if "moe.router" in biased:
        bias = _bias(f"{at}.router.linear", moe.num_experts, tp_dim=-1)
        table.append(replace(bias, serves_tokens=True, is_wide=True))
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
    sizes = {**dict.fromkeys(names, model.expert_width), "down": width}
    for name in (name for name in sizes if f"moe.experts.{name}" in biased):
        table.append(_expert_bias(f"{at}.experts.{name}", (moe.num_experts, sizes[name])))
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


def _expert_bias(name: str, shape: tuple[int, int]) -> GlobalTensor:
    """Return the biases of all experts; etp ranks add other columns of them, the last one's too."""
    return GlobalTensor(
        name=f"{name}.bias", shape=shape, tp_dim=-1, init="zeros", initializer_range=0.0, role="bias",
        etp_dim=1,
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
    if parts_of(model).is_encoder_decoder:
        return with_tuning([replace(t, layer=layer) for t in block_tensors(model, layer)], model)
    at, model = block_name(model, layer), sized_model(model, layer)
    make_attention = _latent_attention_tensors if model.mla.kv_lora_rank else _attention_tensors
    places = parts_of(model).norm_places
    norms = [tensor for place in places for tensor in norm_tensors(f"{at}.{place}", model)]
    kind, has_one = tensor_kind(model, layer)[0], parts_of(model).has_one_part
    attention = []
    if kind in STATES:
        attention = state_tensors(f"{at}.linear_attention", model, kind)
    elif kind not in ALONE:
        attention = make_attention(f"{at}.attention", model)
    is_moe = model.holds_experts(layer)
    inner = _moe_tensors(f"{at}.moe", model) if is_moe else _mlp_tensors(f"{at}.mlp", model)
    inner = [] if has_one and kind not in ALONE else inner
    table = (replace(_scaled(each, model), layer=layer) for each in norms + attention + inner)
    return with_tuning(table, model)


@lru_cache(maxsize=16)
def kinds_of_blocks(model: ModelSection) -> tuple[object, ...]:
    """Return the kind of each block: blocks of one kind have tensors of the same sizes, which are trained alike."""
    layers = range(model.num_layers)
    return tuple((tensor_kind(model, layer), tuned_kind(model, layer)) for layer in layers)


def like_blocks(model: ModelSection) -> dict[int, int]:
    """Return the first block of each kind, and the number of its kind: sums over blocks need no more of them."""
    first: dict[object, int] = {}
    return Counter(first.setdefault(kind, n) for n, kind in enumerate(kinds_of_blocks(model)))


def _scaled(tensor: GlobalTensor, model: ModelSection) -> GlobalTensor:
    """Return the tensor with muP's initial values.

    A matrix inside a block starts with a variance that falls as what it sums over grows.
    """
    std = tensor.initializer_range / sqrt(model.width_ratio)
    return replace(tensor, initializer_range=std) if tensor.role == "matrix" else tensor


def head_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the final norm, the head's own weight when it is not tied, and an encoder's heads."""
    family = parts_of(model)
    table = norm_tensors("final_norm", model) if family.norms != "sum" else []
    if model.head.is_on:
        return with_tuning([*table, *_score_head_tensors(model)], model)
    if not model.tie_word_embeddings:
        head = _table("head", model, role="head")
        is_t5, std = family.is_encoder_decoder, model.hidden_size**-0.5
        table.append(replace(head, initializer_range=std) if is_t5 else head)
    if not family.is_causal:
        table += _encoder_head_tensors(model)
    return with_tuning(table, model)


def _encoder_head_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the transform before the vocabulary, its bias, and with pairs the pooler and their head."""
    width, rows, table = model.hidden_size, model.table_rows, []
    sizes = {"transform": width} | (
        {"pooler": width, "pairs": 2} if model.encoder.has_pairs else {}
    )
    for name, size in sizes.items():
        weight = _weight(f"head.{name}", (size, width), tp_dim=-1, std=model.initializer_range)
        table += [_scaled(weight, model), _bias(f"head.{name}", size, tp_dim=-1)]
    of_rows = replace(_bias("head", rows, tp_dim=0), padded_rows=rows - model.vocab_size)
    return [*table, *norm_tensors("head.transform_norm", model), of_rows]


def _score_head_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the linear layer of a head without a vocabulary, and BERT's pooler before it; whole on every rank."""
    width, head, table = model.hidden_size, model.head, []
    is_causal = parts_of(model).is_causal
    sizes = {"pooler": width} if head.has_pooler(is_causal=is_causal) else {}
    scores = {"score": head.num_scores} if head.num_scores else {}
    for name, size in (sizes | scores).items():
        weight = _weight(f"head.{name}", (size, width), tp_dim=-1, std=model.initializer_range)
        table.append(_scaled(weight, model))
        if name == "pooler" or head.has_bias(is_causal=is_causal):
            table.append(_bias(f"head.{name}", size, tp_dim=-1))
    return table


def mtp_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of multi-token prediction: a join, a block and a last norm a depth."""
    table = []
    for depth in range(model.num_nextn_predict_layers):
        layer = model.num_layers + depth
        at = block_name(model, layer)
        shape = (model.hidden_size, 2 * model.hidden_size)
        own = norm_tensors(f"{at}.token_norm", model) + norm_tensors(f"{at}.hidden_norm", model)
        join = _weight(f"{at}.join", shape, tp_dim=-1, std=model.initializer_range)
        table += with_tuning([*own, _scaled(join, model)], model)
        table += layer_tensors(model, layer)
        table += with_tuning(norm_tensors(f"{at}.final_norm", model), model)
    return table


def model_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return every global tensor once, in layer order."""
    table = embedding_tensors(model)
    for layer in range(model.num_layers):
        table += layer_tensors(model, layer)
    return table + head_tensors(model) + mtp_tensors(model)


def saved_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of a run's checkpoints: with adapters all but what is frozen."""
    return [each for each in model_tensors(model) if not (model.lora.r and each.is_frozen)]


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
