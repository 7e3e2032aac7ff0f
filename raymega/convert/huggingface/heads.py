"""Heads without a vocabulary as transformers has them: classes, settings and names of tensors.

A class is its model's name and one of the ends below. Decoders read a document's last token; encoders pool its first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import Config
from raymega.errors import ConfigError, Fault
from raymega.plan.layers.family_parts import parts_of

SEQUENCE, TOKEN, CHOICE = "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForPreTraining", "ForMaskedLM")
"""Ends of classes with a language model's head."""
ENDS = {
    "sequence_classification": SEQUENCE, "regression": SEQUENCE, "reward": SEQUENCE,
    "token_classification": TOKEN, "multiple_choice": CHOICE,
}  # fmt: skip
LACKING: Mapping[str, tuple[str, ...]] = {
    SEQUENCE: ("Granite", "Glm4Moe", "MiniMaxM2", "Llama4", "NemotronH", "Qwen3_5Moe"),
    TOKEN: ("Granite", "Glm4Moe", "MiniMaxM2", "Llama4", "NemotronH", "Qwen3_5Moe", "Gemma3", "Olmo2", "Olmo3",
            "DeepseekV2", "Qwen3_5"),
}  # fmt: skip
"""Models for which transformers has no class with an end."""
HEADLESS_KINDS = ("none", "embedding")
"""Kinds of heads that have no weights, whose model is transformers' class without a head."""
HEADLESS = ("BertModel", "RobertaModel", "MegatronBertModel")
"""Encoders of transformers without a head, whose weights have no outermost prefix."""
POOLING = "1_Pooling/config.json"
"""File in which sentence-transformers keeps how it pools."""
BESIDE_IMAGES = ("Gemma3", "Qwen3_5")
"""Models whose class of documents without images has Text in its name."""


def head_values(config: Config) -> dict[str, Any]:
    """Return the field ``head`` of the model section by the class that config.json names; empty for a language model.

    Raises:
        ConfigError: The class has another loss than one of the heads here.
    """
    name = next(iter(config.get("architectures") or ()), "")
    if name in HEADLESS:
        return {"head": {"kind": "none"}}
    if name.endswith(CHOICE):
        return {"head": {"kind": "multiple_choice"}}
    if not name.endswith((SEQUENCE, TOKEN)):
        return {}
    problem, labels = config.get("problem_type"), config.get("id2label")
    count = len(labels) if labels else config.get("num_labels", 2)
    kind = "token_classification" if name.endswith(TOKEN) else "sequence_classification"
    if kind == "sequence_classification" and count == 1:
        return {"head": {"kind": "regression" if problem == "regression" else "reward"}}
    if problem not in (None, "single_label_classification"):
        raise ConfigError(
            Fault(
                fact=f"config.json has problem_type={problem!r} and {count} labels",
                rule="heads have one class a document, or one number",
                remedy="convert a model of one of these kinds",
            )
        )
    return {"head": {"kind": kind, "num_labels": count}}


def head_config(model: ModelSection, class_name: str, carried: Config) -> dict[str, Any]:
    """Return the settings of a model with such a head.

    Args:
        model: Model section to translate.
        class_name: Name of its class with a language model's head.
        carried: Content of the config.json that the model was imported with; as many labels keep their names.

    Raises:
        ConfigError: transformers has no such class.
    """
    head = model.head
    if not head.is_on:
        return {}
    base = class_name
    for end in LANGUAGE:
        base = base.removesuffix(end)
    if head.kind in HEADLESS_KINDS:
        return {"architectures": [f"{base}Model"]}
    end, is_causal = ENDS[head.kind], parts_of(model).is_causal
    if base.removesuffix("Text") in LACKING.get(end, ()) or (end == CHOICE and is_causal):
        raise ConfigError(
            Fault(
                fact=f"model.head.kind={head.kind} with model.family={model.family}",
                rule=f"transformers has no {base}{end}",
                remedy="export it with dcp-export, which keeps raymega's names",
            )
        )
    name = f"{base}{'Text' if base in BESIDE_IMAGES else ''}{end}"
    config: dict[str, Any] = {"architectures": [name]}
    if end != CHOICE:
        labels = {str(n): f"LABEL_{n}" for n in range(head.num_scores)}
        theirs = carried.get("id2label") or {}
        if theirs.keys() == labels.keys():
            labels = theirs
        config["id2label"] = labels
        config["label2id"] = {str(label): int(n) for n, label in labels.items()}
    if head.kind == "regression":
        config["problem_type"] = "regression"
    return config


def head_names(model: ModelSection) -> dict[str, tuple[str, ...]]:
    """Return their modules of the head, and ours; of names for tensors that the model lacks none is used."""
    kind, family = model.head.kind, model.family
    if not model.head.is_on:
        return {}
    if parts_of(model).is_causal:
        is_classifier = kind == "token_classification" and family in ("gpt2", "gpt_neox")
        return {"classifier" if is_classifier else "score": ("head.score",)}
    if family == "roberta" and ENDS.get(kind) == SEQUENCE:
        return {"classifier.dense": ("head.pooler",), "classifier.out_proj": ("head.score",)}
    prefix = "roberta" if family == "roberta" else "bert"
    return {f"{prefix}.pooler.dense": ("head.pooler",), "classifier": ("head.score",)}


def with_headless_pooling(model: ModelSection, folder: Path, *, has_pooler: bool) -> ModelSection:
    """Return an encoder without a head, pooled as ``folder`` says: by sentence-transformers' file, or by its pooler."""
    path, is_mean = folder / POOLING, not has_pooler
    if path.is_file():
        is_mean |= bool(_pooling_settings(path).get("pooling_mode_mean_tokens"))
    head = model.head.model_copy(update={"pooling": "mean" if is_mean else "auto"})
    return model.model_copy(update={"head": head})


def _pooling_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            fact=f"{path} cannot be read ({error})",
            rule="it says how sentence-transformers pools, as a JSON object",
            remedy="take it from the same place as the weights, or remove it: a model without a pooler has means",
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            fact=f"{path} holds a {type(settings).__name__}",
            rule="it says how sentence-transformers pools, as a JSON object",
            remedy="take it from the same place as the weights, or remove it: a model without a pooler has means",
        )
    return settings


def sentence_files(model: ModelSection, *, is_readable: bool) -> dict[str, Any]:
    """Return the JSON files by which sentence-transformers pools and normalises an embedding; none of other heads.

    Args:
        model: Model section of the export.
        is_readable: Whether its folder has a tokenizer.
    """
    head = model.head
    if head.kind != "embedding" or not is_readable:
        return {}
    pooling = head.pools(is_causal=parts_of(model).is_causal)
    modes = {"first": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    chosen = {f"pooling_mode_{mode}": name == pooling for name, mode in modes.items()}
    names = ["Transformer", "Pooling", *(["Normalize"] if head.normalize else [])]
    modules = [
        {
            "idx": number, "name": str(number), "path": f"{number}_{name}" if number else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    return {
        POOLING: {"word_embedding_dimension": model.hidden_size, **chosen},
        "modules.json": modules,
    }


def compared_head(model: ModelSection) -> dict[str, Any]:
    """Return what of the head a config.json must express, in comparable form."""
    head, is_causal = model.head, parts_of(model).is_causal
    is_pooled = head.is_on and head.kind not in ("token_classification", *HEADLESS_KINDS)
    kind = head.kind
    if kind in HEADLESS_KINDS:  # a decoder's class without a head is read as its language model
        kind = "language_model" if is_causal else "none"
    return {
        "kind": kind,
        "num_scores": head.num_scores if head.is_on else 0,
        "pooling": head.pools(is_causal=is_causal) if is_pooled else "none",
    }
