"""Mistral: Llama with a window in every layer, or without one."""

from __future__ import annotations

from raymega.convert.huggingface.architectures import ARCHITECTURES
from raymega.convert.huggingface.families.family import HfFamily

MISTRAL = HfFamily(
    architecture=ARCHITECTURES["mistral"],
    layer_types=lambda _: ("sliding_attention",),
    writes_layer_types=False,
)
