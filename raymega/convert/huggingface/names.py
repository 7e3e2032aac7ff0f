"""Hugging Face's names of our tensors: one table for both directions.

One of their tensors is a concatenation of ours along dim 0, transposed in GPT-2, whose layers are
convolutions of width 1. Our tensor of all experts is one tensor per expert there. RoPE needs no
permutation: both sides rotate halves (with latents, neighbours).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import architecture_of
from raymega.convert.huggingface.families.bert import COPIES, UNREAD_BIASES, with_own_head
from raymega.convert.huggingface.families.family import StackedExperts
from raymega.convert.huggingface.families.images.image_families import image_family_of
from raymega.convert.huggingface.families.images.llava import CLASS_TOKEN
from raymega.convert.huggingface.families.t5 import T5_COPIES
from raymega.convert.huggingface.families.table import hf_family
from raymega.convert.huggingface.heads import HEADLESS_KINDS, head_names
from raymega.convert.number_formats import Array
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import block_name, model_tensors

TABLES = ("embedding.tokens.weight", "head.weight", "head.bias")
"""Tensors with one row per token; ours have padded rows behind the vocabulary."""

HEAD = "lm_head.weight"
HEADS = (HEAD, "embed_out.weight")
"""Names of the head, which never have the prefix of the other tensors."""
ROUTER = "moe.router"
# "Further" blocks are those of multi-token prediction, which follow the model's layers there.
FURTHER_COPY = re.compile(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight")
MOST_FURTHER = 16


_GPT2_OUTER: Mapping[str, tuple[str, ...]] = {
    "transformer.wte": ("embedding.tokens",),
    "transformer.wpe": ("embedding.positions",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("head",),
}
_LLAMA_OUTER: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens": ("embedding.tokens",),
    "model.norm": ("final_norm",),
    "lm_head": ("head",),
}
_GPT2 = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
    "attn.c_proj": ("attention.out",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}
_LLAMA = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_latent_norm",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_latent_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_SHARED = {f"{name}_proj": f"moe.shared.{name}" for name in ("gate", "up", "down")}
_DEEPSEEK_SHARED = {f"mlp.shared_experts.{theirs}": ours for theirs, ours in _SHARED.items()}
_QWEN_SHARED = {
    "mlp.shared_expert_gate": "moe.shared_gate",
    **{f"mlp.shared_expert.{theirs}": ours for theirs, ours in _SHARED.items()},
}
_SHARED_EXPERTS = {
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_next": _QWEN_SHARED,
    "qwen3_5_moe_text": _QWEN_SHARED,
    "deepseek_v2": _DEEPSEEK_SHARED,
    "deepseek_v3": _DEEPSEEK_SHARED,
    "deepseek_v32": _DEEPSEEK_SHARED,
}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_MIXTRAL_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down"}
_FURTHER = {
    "enorm": "token_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "shared_head.norm": "final_norm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTensor:
    """A tensor of Hugging Face's model, expressed by ours.

    Attributes:
        name: Name there.
        parts: Tensors of ours whose concatenation along dim 0 it is.
        is_transposed: Whether theirs is the transpose of the concatenation.
        num_rows: Number of leading rows of the concatenation that theirs has; ours may have padded rows.
        expert: Index of the expert that theirs holds, along dim 0 of ours; -1 for other tensors.
        num_heads: Number of heads by which the rows of the parts alternate, as in GPT-NeoX; 0 for parts
            that follow one another.
        is_of_all_experts: Whether theirs holds all experts, [E, in, out], with the parts side by side
            along out; biases are [E, out].
        is_interleaved: Whether the outputs of its parts alternate one by one.
        divisor: Divisor of our values; the last norm includes muP's factor of the logits, which their
            models cannot express.
        unfolded: Shape of theirs where ours has two of its dims as one; empty where dims are alike.
    """

    name: str
    parts: tuple[GlobalTensor, ...]
    is_transposed: bool
    num_rows: int
    expert: int = -1
    num_heads: int = 0
    is_of_all_experts: bool = False
    is_interleaved: bool = False
    divisor: float = 1.0
    unfolded: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        if self.unfolded:
            return self.unfolded
        if self.expert >= 0:
            return self.parts[0].shape[1:]
        if self.is_of_all_experts:
            experts, _, *inner = self.parts[0].shape
            return (experts, *inner, sum(part.shape[1] for part in self.parts))
        stacked = (self.num_rows, *self.parts[0].shape[1:])
        return stacked[::-1] if self.is_transposed else stacked

    def of_experts(self, parts: Sequence[Array]) -> Array:
        """Return their tensor of all experts, of the values of ours."""
        joined = np.concatenate(parts, 1)
        if self.is_interleaved:
            joined = np.stack(parts, 2).reshape(joined.shape)
        return joined.swapaxes(1, -1)

    def part_of_experts(self, values: Array, name: str) -> Array:
        """Return the values of our tensor ``name`` of all experts, of those of theirs."""
        number = [part.name for part in self.parts].index(name)
        rows, count = values.swapaxes(1, -1), len(self.parts)
        return rows[:, number::count] if self.is_interleaved else np.split(rows, count, 1)[number]

    def by_head(self, stack: Array) -> Array:
        """Return the parts' rows, one part after another, in the order that they have there."""
        if not self.num_heads:
            return stack
        ends = np.cumsum([part.shape[0] for part in self.parts])[:-1]
        groups = [
            rows.reshape(self.num_heads, -1, *rows.shape[1:]) for rows in np.split(stack, ends)
        ]
        return np.concatenate(groups, 1).reshape(stack.shape)

    def by_part(self, rows: Array) -> Array:
        """Return their rows in the order of the parts, one after another."""
        if not self.num_heads:
            return rows
        ends = np.cumsum([part.shape[0] // self.num_heads for part in self.parts])[:-1]
        groups = rows.reshape(self.num_heads, -1, *rows.shape[1:])
        parts = [part.reshape(-1, *rows.shape[1:]) for part in np.split(groups, ends, 1)]
        return np.concatenate(parts)


def head_name(model: ModelSection) -> str:
    """Return their name of a decoder's head."""
    return f"{image_family_of(model.vision).text_prefix}{HEAD}" if model.vision.is_on else HEAD


def hf_tensors(model: ModelSection) -> list[HfTensor]:
    """Return every tensor of ``model`` as Hugging Face has it, in layer order, without a tied head."""
    text = _text_tensors(model)
    if not model.vision.is_on:
        return text
    ours = {tensor.name: tensor for tensor in model_tensors(model)}
    family = image_family_of(model.vision)
    named = {
        f"{theirs}.{kind}": [f"{part}.{kind}" for part in parts]
        for theirs, parts in family.vision_names(model.vision).items()
        for kind in ("weight", "bias")
    }
    if model.vision.has_class_token:
        named[CLASS_TOKEN[0]] = [CLASS_TOKEN[1]]
    shapes = family.unfolded(model.vision)
    tower = [
        replace(_hf_tensor(name, parts, ours, model), unfolded=shapes.get(name, ()))
        for name, parts in named.items()
        if parts[0] in ours
    ]
    # token table first, as in other models: a tied head is compared with it
    return [*(replace(each, name=f"{family.text_prefix}{each.name}") for each in text), *tower]


def _text_tensors(model: ModelSection) -> list[HfTensor]:
    """Return the tensors of the model without its vision tower."""
    ours = {tensor.name: tensor for tensor in model_tensors(model)}
    family = hf_family(architecture_of(model))
    llama_outer = (family.outer if family else {}) or _LLAMA_OUTER
    names: dict[str, tuple[str, ...]] = dict(_GPT2_OUTER if model.family == "gpt2" else llama_outer)
    for layer in range(model.num_layers + model.num_nextn_predict_layers):
        names |= _gpt2_layer(layer) if model.family == "gpt2" else _llama_layer(layer, model)
    names |= head_names(model)
    if has_own_table(model):
        names = dict(with_own_head(names))
    # Tables of names cover all families: only tensors that this model has are kept.
    found = [
        _hf_tensor(f"{theirs}.{kind}", [f"{part}.{kind}" for part in parts], ours, model)
        for theirs, parts in names.items()
        for kind in ("weight", "bias")
        if f"{parts[0]}.{kind}" in ours
    ]
    for layer in range(model.num_layers + model.num_nextn_predict_layers):
        if family is not None:
            at = block_name(model, layer)
            found += [
                _hf_tensor(f"{family.prefix}.{layer}.{theirs}", [f"{at}.{part}"], ours, model)
                for theirs, part in family.tensors.items()
                if f"{at}.{part}" in ours
            ]
        if model.holds_experts(layer):
            found += _expert_tensors(layer, ours, model)
    # Our order; experts of one tensor follow one another, which exporter.py relies on.
    order = {name: index for index, name in enumerate(ours)}
    return sorted(found, key=lambda tensor: (order[tensor.parts[0].name], tensor.expert))


def has_own_table(model: ModelSection) -> bool:
    """Return whether the model is an encoder whose head has a table of its own."""
    return not (parts_of(model).is_causal or model.tie_word_embeddings or model.head.is_on)


def exported_tensors(model: ModelSection) -> list[HfTensor]:
    """Return the tensors that an export writes: :func:`hf_tensors`, and an untied encoder's bias by both its names.

    A model without a head's weights has names without the outermost prefix, as transformers' class has.
    """
    tensors = hf_tensors(model)
    if model.head.kind in HEADLESS_KINDS:
        return [replace(each, name=each.name.partition(".")[2]) for each in tensors]
    if not has_own_table(model):
        return tensors
    second = [[t, replace(t, name=UNREAD_BIASES.get(t.name, t.name))] for t in tensors]
    return [each for pair in second for each in (pair[:1] if pair[0] == pair[1] else pair)]


def num_further(names: Iterable[str], num_layers: int) -> int:
    """Return the number of multi-token-prediction blocks among the tensors ``names`` of theirs."""
    joins = {f"layers.{num_layers + depth}.eh_proj.weight" for depth in range(MOST_FURTHER)}
    # families differ in the outermost name
    return len(joins.intersection(name.partition(".")[2] for name in names))


def original_of(name: str, model: ModelSection) -> str | None:
    """Return the tensor that their ``name`` is a copy of, in an encoder's head or a further block; or None."""
    if name in COPIES and has_own_table(model):
        return None
    if name in COPIES or name in T5_COPIES:
        return {**COPIES, **T5_COPIES}[name]
    found = FURTHER_COPY.fullmatch(name)
    if found is None or int(found[1]) < model.num_layers:
        return None
    is_table = found[2] == "embed_tokens" or model.tie_word_embeddings
    return "model.embed_tokens.weight" if is_table else HEAD


def _expert_tensors(
    layer: int, ours: Mapping[str, GlobalTensor], model: ModelSection
) -> list[HfTensor]:
    """Return the tensors of router and experts of one block."""
    kind = architecture_of(model)
    family = hf_family(kind)
    prefix = family.prefix if family is not None else "model.layers"
    at, theirs = block_name(model, layer), f"{prefix}.{layer}"
    if family is not None and family.experts is not None:
        return _stacked_experts(f"{theirs}.{family.experts.module}", at, ours, family.experts)
    is_mixtral = kind in ("mixtral", "minimax_m2")
    own = family.expert_module if family is not None else "mlp"
    module = "block_sparse_moe" if is_mixtral else own
    bias = module if kind == "minimax_m2" else f"{module}.gate"
    names = {f"{module}.gate.weight": "weight", f"{bias}.e_score_correction_bias": "bias"}
    found = [
        _hf_tensor(f"{theirs}.{name}", [f"{at}.{ROUTER}.{part}"], ours, model)
        for name, part in names.items()
        if f"{at}.{ROUTER}.{part}" in ours
    ]
    # One tensor per expert and projection.
    for name, part in (_MIXTRAL_EXPERTS if is_mixtral else _EXPERTS).items():
        tensor = ours.get(f"{at}.moe.experts.{part}.weight")
        if tensor is None:  # experts without a gate
            continue
        found += [
            HfTensor(
                name=f"{theirs}.{module}.experts.{expert}.{name}.weight",
                parts=(tensor,),
                is_transposed=False,
                num_rows=tensor.shape[1],
                expert=expert,
            )
            for expert in range(model.moe.num_experts)
        ]
    return found


def _stacked_experts(
    theirs: str, at: str, ours: Mapping[str, GlobalTensor], layout: StackedExperts
) -> list[HfTensor]:
    """Return the tensors of one block that hold all experts each, and their biases if there are any."""
    groups = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    return [
        HfTensor(
            name=f"{theirs}.{name}{end}",
            parts=tuple(ours[f"{at}.moe.experts.{part}.{kind}"] for part in parts),
            is_transposed=False,
            num_rows=ours[f"{at}.moe.experts.{parts[0]}.{kind}"].shape[0],
            is_of_all_experts=True,
            is_interleaved=layout.is_interleaved,
        )
        for name, parts in groups.items()
        for kind, end in (("weight", ""), ("bias", "_bias"))
        if f"{at}.moe.experts.{parts[0]}.{kind}" in ours
    ]


def _hf_tensor(
    name: str, parts: list[str], ours: Mapping[str, GlobalTensor], model: ModelSection
) -> HfTensor:
    tensors = tuple(ours[part] for part in parts)
    # GPT-2's Conv1D keeps weights as [in, out]; its embeddings and norms are as ours.
    is_linear = ".attn." in name or ".mlp." in name
    last_norm = "final_norm" if parts_of(model).is_causal else "transform_norm"
    is_last_norm = parts[0].split(".")[-2] == last_norm
    return HfTensor(
        name=name,
        parts=tensors,
        is_transposed=model.family == "gpt2" and is_linear and name.endswith(".weight"),
        num_rows=model.vocab_size if parts[0] in TABLES else sum(t.shape[0] for t in tensors),
        num_heads=_heads_of(name, model),
        divisor=model.width_ratio if is_last_norm else 1.0,
    )


def _heads_of(name: str, model: ModelSection) -> int:
    """Return the number of heads by which the rows of their tensor alternate between ours, or 0."""
    family, module = hf_family(architecture_of(model)), name.rpartition(".")[0]
    if family is None:
        return 0
    counts = {
        family.head_wise: model.num_heads,
        family.key_head_wise: model.linear_attention.num_key_heads,
    }
    return next((count for ends, count in counts.items() if module.endswith(ends)), 0)


def _gpt2_layer(layer: int) -> dict[str, tuple[str, ...]]:
    return {
        f"transformer.h.{layer}.{theirs}": tuple(f"layers.{layer}.{part}" for part in parts)
        for theirs, parts in _GPT2.items()
    }


def _llama_layer(layer: int, model: ModelSection) -> dict[str, tuple[str, ...]]:
    """Return their names and ours of the modules of one block."""
    at, kind = block_name(model, layer), architecture_of(model)
    own_family = hf_family(kind)
    if own_family is not None and own_family.blocks is not None:
        return dict(own_family.blocks(model, layer))
    names = _LLAMA | _SHARED_EXPERTS.get(kind, {})
    if layer >= model.num_layers:
        names |= _FURTHER
    each: dict[str, tuple[str, ...]] = {theirs: (ours,) for theirs, ours in names.items()}
    family, prefix = hf_family(kind), "model.layers"
    if family is not None:
        # a module of ours has one name there: the family's own takes Llama's place
        own = {part for parts in family.modules.values() for part in parts}
        kept = {theirs: parts for theirs, parts in each.items() if own.isdisjoint(parts)}
        each, prefix = {**kept, **family.modules}, family.prefix
    return {
        f"{prefix}.{layer}.{theirs}": tuple(f"{at}.{part}" for part in parts)
        for theirs, parts in each.items()
    }
