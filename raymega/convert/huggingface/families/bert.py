"""BERT, RoBERTa and Megatron-LM's BERT: encoders with learned positions, token types and a head with a transform.

BERT and RoBERTa have norms after sums, Megatron-LM's before each part. RoBERTa's positions begin at row 2 of
their table, behind that of padding, and it has no pairs of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import Architecture, Config, alike, ours, theirs
from raymega.convert.huggingface.families.family import HfFamily, Names

PAIRS = "cls.seq_relationship.weight"
"""Tensor of theirs that a model with a head for pairs has."""
POOLERS = ("bert.pooler.dense.", "roberta.pooler.dense.")
"""Begin of the names of a pooler, which published files have even where no head reads it."""
COPIES: Mapping[str, str] = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Tensors that old files hold a second time, and the originals, where the head is tied."""
UNREAD_BIASES: Mapping[str, str] = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Bias of an untied head by its name in transformers 5, and by the one that transformers 4 reads and 5 only keeps."""
_SETTINGS = {
    **alike("vocab_size", "tie_word_embeddings", "initializer_range", "hidden_size"),
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_positions",
    "layer_norm_eps": "norm_eps",
}
_DEFAULTS = {
    "hidden_act": "gelu", "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
_WANTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}
_LAYER: Names = {
    "attention.self.query": ("attention.q",),
    "attention.self.key": ("attention.k",),
    "attention.self.value": ("attention.v",),
    "attention.output.dense": ("attention.out",),
    "intermediate.dense": ("mlp.up",),
    "output.dense": ("mlp.down",),
}
_SUM_NORMS: Names = {
    "attention.output.LayerNorm": ("attention_sum_norm",),
    "output.LayerNorm": ("mlp_sum_norm",),
}
_NORMS: Names = {"attention.ln": ("attention_norm",), "ln": ("mlp_norm",)}
_HEAD: Names = {
    "bert.pooler.dense": ("head.pooler",),
    "cls.predictions.transform.dense": ("head.transform",),
    "cls.predictions.transform.LayerNorm": ("head.transform_norm",),
    "cls.predictions": ("head",),
    "cls.seq_relationship": ("head.pairs",),
}
_ROBERTA_HEAD: Names = {
    "lm_head.dense": ("head.transform",),
    "lm_head.layer_norm": ("head.transform_norm",),
    "lm_head": ("head",),
}


def with_own_head(names: Names) -> Names:
    """Return the names of modules of a model whose head has a table of its own, beside its bias."""
    return {
        f"{there}.decoder" if here == ("head",) else there: here for there, here in names.items()
    }


def _outer(prefix: str, head: Names) -> Names:
    return {
        f"{prefix}.embeddings.word_embeddings": ("embedding.tokens",),
        f"{prefix}.embeddings.position_embeddings": ("embedding.positions",),
        f"{prefix}.embeddings.token_type_embeddings": ("embedding.token_types",),
        f"{prefix}.embeddings.LayerNorm": ("embedding.norm",),
        f"{prefix}.encoder.ln": ("final_norm",),
        **head,
    }


def _values(config: Config) -> dict[str, Any]:
    # the class says whether there is a head for pairs; no setting does
    has_pairs = "ForPreTraining" in str(config.get("architectures"))
    encoder = {
        "type_vocab_size": config["type_vocab_size"],
        "sentence_loss": "next_sentence" if has_pairs else "none",
    }
    return {**ours(_SETTINGS, config), "encoder": encoder}


def _writer(name: str, **more: object) -> Callable[[ModelSection], dict[str, Any]]:
    """Return the function that writes the settings of the architectures that begin with ``name``."""

    def config(model: ModelSection) -> dict[str, Any]:
        head = "ForPreTraining" if model.encoder.has_pairs else "ForMaskedLM"
        return {
            **theirs(_SETTINGS, model),
            "architectures": [f"{name}{head}"],
            "hidden_act": "gelu",
            "type_vocab_size": model.encoder.type_vocab_size,
            **more,
        }

    return config


BERT = HfFamily(
    architecture=Architecture("BertForPreTraining", "bert", _DEFAULTS, _WANTED),
    prefix="bert.encoder.layer",
    outer=_outer("bert", _HEAD),
    modules={**_LAYER, **_SUM_NORMS},
    values=_values,
    config=_writer("Bert"),
    owns_settings=True,
)
MEGATRON_BERT = HfFamily(
    architecture=Architecture("MegatronBertForPreTraining", "megatron_bert", _DEFAULTS, _WANTED),
    prefix="bert.encoder.layer",
    outer=_outer("bert", _HEAD),
    modules={**_LAYER, **_NORMS},
    values=_values,
    config=_writer("MegatronBert"),
    owns_settings=True,
)
ROBERTA = HfFamily(
    architecture=Architecture(
        "RobertaForMaskedLM", "roberta", {**_DEFAULTS, "pad_token_id": 1}, {**_WANTED, "pad_token_id": (1,)}
    ),
    prefix="roberta.encoder.layer",
    outer=_outer("roberta", _ROBERTA_HEAD),
    modules={**_LAYER, **_SUM_NORMS},
    values=_values,
    config=_writer("Roberta", pad_token_id=1),
    owns_settings=True,
)  # fmt: skip
