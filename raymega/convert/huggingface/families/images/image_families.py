"""The architectures that read images, by model_type and by ``model.vision.kind``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection
from raymega.convert.huggingface.architectures import Config
from raymega.convert.huggingface.families.family import Names
from raymega.convert.huggingface.families.images import llava, qwen2_vl


def _none(_: VisionSection) -> dict[str, tuple[int, ...]]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFamily:
    """An architecture around a language model of another family.

    Attributes:
        text_of: Function from config.json to that of the language model.
        vision_of: Function from config.json to the vision section.
        config: Function from the model section, the language model's config.json and the carried one to config.json.
        known_name: Function from a tensor's name in any release to that in files.
        vision_names: Function from the vision section to the names of the tower's and projector's modules.
        text_prefix: Begin of the names of the language model's tensors.
        unfolded: Function from the vision section to the shapes of tensors of which ours have two dims as one, by name.
        unsaid: Fields of the vision section that config.json does not express.
    """

    text_of: Callable[[Config], dict[str, Any]]
    vision_of: Callable[[Config], VisionSection]
    config: Callable[[ModelSection, Config, Config], dict[str, Any]]
    known_name: Callable[[str], str]
    vision_names: Callable[[VisionSection], Names]
    text_prefix: str = ""
    unfolded: Callable[[VisionSection], Mapping[str, tuple[int, ...]]] = _none
    unsaid: tuple[str, ...] = llava.TRAINING


IMAGE_FAMILIES: Mapping[str, ImageFamily] = {
    llava.LLAVA: ImageFamily(
        text_of=llava.text_of,
        vision_of=llava.vision_of,
        config=llava.llava_config,
        known_name=llava.known_name,
        vision_names=llava.vision_names,
        text_prefix=llava.TEXT_PREFIX,
    ),
    qwen2_vl.QWEN2_VL: ImageFamily(
        text_of=qwen2_vl.text_of,
        vision_of=qwen2_vl.vision_of,
        config=qwen2_vl.qwen2_vl_config,
        known_name=qwen2_vl.known_name,
        vision_names=qwen2_vl.vision_names,
        unfolded=qwen2_vl.unfolded,
        unsaid=(*llava.TRAINING, "image_size", "min_pixels", "max_pixels", "mean_pixels"),
    ),
}
"""Architectures by the value of model_type in config.json."""


def image_family_of(vision: VisionSection) -> ImageFamily:
    """Return the architecture of a model that reads images."""
    return IMAGE_FAMILIES[qwen2_vl.QWEN2_VL if vision.kind == "qwen2_vl" else llava.LLAVA]
