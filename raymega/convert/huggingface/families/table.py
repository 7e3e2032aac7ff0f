"""The families that have a file of their own, by ``model_type``, and all known architectures."""

from __future__ import annotations

from collections.abc import Mapping

from raymega.convert.huggingface.architectures import ARCHITECTURES, Architecture
from raymega.convert.huggingface.families import (
    bert,
    deepseek_v32,
    gemma,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    llama4,
    minimax_m2,
    mistral,
    nemotron_h,
    olmo,
    openelm,
    phi3,
    qwen3_5,
    qwen3_next,
    t5,
)
from raymega.convert.huggingface.families.family import HfFamily
from raymega.plugins import code_of, known_names

HF_FAMILIES: Mapping[str, HfFamily] = {
    "mistral": mistral.MISTRAL,
    "smollm3": mistral.SMOLLM3,
    "olmo2": olmo.OLMO2,
    "phi3": phi3.PHI3,
    "granite": granite.GRANITE,
    "gpt_neox": gpt_neox.GPT_NEOX,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "olmo3": olmo.OLMO3,
    "glm4_moe": glm4_moe.GLM4_MOE,
    "minimax_m2": minimax_m2.MINIMAX_M2,
    "gpt_oss": gpt_oss.GPT_OSS,
    "llama4_text": llama4.LLAMA4,
    "qwen3_next": qwen3_next.QWEN3_NEXT,
    "qwen3_5_text": qwen3_5.QWEN3_5,
    "qwen3_5_moe_text": qwen3_5.QWEN3_5_MOE,
    "openelm": openelm.OPENELM,
    "nemotron_h": nemotron_h.NEMOTRON_H,
    "deepseek_v32": deepseek_v32.DEEPSEEK_V32,
    "bert": bert.BERT,
    "megatron-bert": bert.MEGATRON_BERT,
    "roberta": bert.ROBERTA,
    "t5": t5.T5,
}
"""Families by the value of model_type in config.json."""


def hf_family(model_type: str) -> HfFamily | None:
    """Return the family of a model_type, which may be a plug-in's; None for those of Llama's form and unknown ones.

    A plug-in's is named after its package and the model_type, ``acme.stablelm``.
    """
    for name in known_names("hf_family"):
        if name.partition(".")[2] == model_type or name == model_type:
            family: HfFamily = code_of("hf_family", name)
            return family
    return None


def architecture(model_type: str) -> Architecture | None:
    """Return the architecture of a model_type; None for one that cannot be converted."""
    family = hf_family(model_type)
    return family.architecture if family else ARCHITECTURES.get(model_type)


def known_types() -> list[str]:
    """Return the model_types that can be converted."""
    names = known_names("hf_family")
    return [
        *ARCHITECTURES,
        *(name.rpartition(".")[2] for name in names if name not in ARCHITECTURES),
    ]
