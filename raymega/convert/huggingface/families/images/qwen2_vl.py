"""Qwen2-VL: Qwen2 with M-RoPE behind a tower that rotates by row and column, and merges patches.

Its config.json holds both, side by side in the first release and in sections later. It does not say how large images
are, as its own processor keeps their shapes; here all are squares of one size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raymega.config.schema import ModelSection
from raymega.config.vision.section import CHANNELS, CLIP_MEAN, CLIP_STD, VisionSection
from raymega.convert.huggingface.architectures import Config, unlike
from raymega.convert.huggingface.families.family import Names
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.layers.vision import FRAMES, VISION

QWEN2_VL, CLASS = "qwen2_vl", "Qwen2VLForConditionalGeneration"
IMAGE_SIZE = 448
"""Height and width of images after an import, 256 tokens; the job file may set another."""
_NORM_EPS = 1e-6
_TOWER = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES, "in_channels": CHANNELS, "hidden_act": "quick_gelu", "initializer_range": 0.02,
}  # fmt: skip
_OUTER = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
          "vision_token_id", "architectures", "model_type", "image_mean", "image_std")  # fmt: skip
"""Settings of the first release that are none of the language model."""
_CURRENT = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
"""Patterns of names that later releases have in memory, and those of files."""


def text_of(config: Config) -> dict[str, Any]:
    """Return the config.json of the language model, whose RoPE has one position a token."""
    # the first release has the language model's settings beside the others
    found = config.get("text_config")
    text = dict(found) if isinstance(found, Mapping) else {**config}
    if not isinstance(found, Mapping):
        text = {name: value for name, value in text.items() if name not in _OUTER}
    is_tied = bool(config.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    # the three positions of M-RoPE are the vision section's; what is left is ordinary RoPE
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if isinstance(rope, Mapping):
            plain = {key: value for key, value in rope.items() if key != "mrope_section"}
            kinds = {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}
            text[name] = plain | kinds
    return {**text, "model_type": "qwen2", "tie_word_embeddings": is_tied}


def _sections(config: Config) -> Any:
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    found = None
    for table in (text.get("rope_scaling"), text.get("rope_parameters")):
        if isinstance(table, Mapping):
            found = table.get("mrope_section", found)
    if found is None:
        raise KeyError("mrope_section")
    return tuple(found) if isinstance(found, list) else found


def vision_of(config: Config) -> VisionSection:
    """Return the vision section of a config.json.

    Raises:
        ConfigError: The tower has a setting that raymega does not reproduce.
        KeyError: There is no vision_config, or no mrope_section.
    """
    stated = config.get("vision_config")
    if not isinstance(stated, Mapping):
        raise KeyError("vision_config")
    tower = {**_TOWER, **{name: value for name, value in stated.items() if value is not None}}
    raise_faults(ConfigError, [*_faults(tower)])
    # images have any size there; here all have one, whole squares of merged patches
    square = tower["patch_size"] * tower["spatial_merge_size"]
    return VisionSection.model_validate(
        {
            "kind": "qwen2_vl",
            "image_size": max(1, IMAGE_SIZE // square) * square,
            "patch_size": tower["patch_size"],
            "num_layers": tower["depth"],
            "hidden_size": tower["embed_dim"],
            "num_heads": tower["num_heads"],
            "ffn_hidden_size": tower["embed_dim"] * tower["mlp_ratio"],
            "norm_eps": _NORM_EPS,
            "feature_layer": -1,
            "spatial_merge_size": tower["spatial_merge_size"],
            "mrope_section": _sections(config),
            "image_token_id": config.get("image_token_id", 151655),
            "image_mean": _floats(config.get("image_mean") or CLIP_MEAN),
            "image_std": _floats(config.get("image_std") or CLIP_STD),
        }
    )


def _floats(found: Any) -> Any:
    # whole numbers are none for a strict parser; of another type the section says what is wrong
    if not isinstance(found, list | tuple):
        return found
    return tuple(float(each) if type(each) is int else each for each in found)


def _faults(tower: Config) -> Iterator[Fault]:
    for name in (
        "depth",
        "embed_dim",
        "mlp_ratio",
        "num_heads",
        "patch_size",
        "spatial_merge_size",
    ):
        if type(tower[name]) is not int or tower[name] < 1:
            yield unlike(f"vision_config.{name}={tower[name]!r}", "it is a whole number from 1")
    for name in ("hidden_act", "in_channels", "temporal_patch_size"):
        if tower[name] != _TOWER[name]:
            yield unlike(f"vision_config.{name}={tower[name]!r}", f"only {_TOWER[name]!r} is built")


def qwen2_vl_config(model: ModelSection, text: Config, carried: Config) -> dict[str, Any]:
    """Return the config.json of a model that reads images, of that of its language model.

    Raises:
        ConfigError: The sizes are none that a config.json of this class can express.
    """
    vision = model.vision
    # what their class has no setting for
    ratio, rest = divmod(vision.ffn_hidden_size, vision.hidden_size)
    plain = (rest, vision.activation, vision.feature_layer, vision.norm_eps)
    if plain != (0, "quick_gelu", -1, _NORM_EPS) or not vision.mrope_section:
        raise ConfigError(
            Fault(
                fact=f"model.vision has ffn_hidden_size={vision.ffn_hidden_size}, activation={vision.activation}, "
                f"feature_layer={vision.feature_layer}, norm_eps={vision.norm_eps:g} and "
                f"mrope_section={list(vision.mrope_section)}",
                rule=f"{CLASS} has a multiple of hidden_size={vision.hidden_size}, quick_gelu, the last block, {_NORM_EPS:g} "
                "and M-RoPE",
                remedy="export it with dcp-export, which keeps raymega's names",
            )
        )
    # the language model's settings in a table of their own, as later releases write them
    left_out = ("rope_theta", "rope_scaling", "architectures", "dtype")
    rope = {**text["rope_parameters"], "mrope_section": list(vision.mrope_section)}
    inner = {name: value for name, value in text.items() if name not in left_out}
    tower = {
        **(carried.get("vision_config") or {}),
        "model_type": "qwen2_vl_vision",
        "depth": vision.num_layers,
        "embed_dim": vision.hidden_size,
        "hidden_size": model.hidden_size,
        "mlp_ratio": ratio,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "temporal_patch_size": FRAMES,
        "in_channels": CHANNELS,
        "hidden_act": "quick_gelu",
    }
    outer = {name: carried[name] for name in _OUTER if name in carried and name != "image_mean"}
    return {
        **outer,
        "architectures": [CLASS],
        "model_type": QWEN2_VL,
        "text_config": {**inner, "model_type": "qwen2_vl_text", "rope_parameters": rope},
        "vision_config": tower,
        "image_token_id": vision.image_token_id,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def known_name(name: str) -> str:
    """Return the name of a tensor in files, of that in any release's."""
    for pattern, instead in _CURRENT:
        name = re.sub(pattern, instead, name)
    return name


def vision_names(vision: VisionSection) -> Names:
    """Return their modules of tower and merger, and ours."""
    here = VISION
    # patches and merger, then the blocks; queries, keys and values are stacked there
    names: dict[str, tuple[str, ...]] = {
        "visual.patch_embed.proj": (f"{here}.patches",),
        "visual.merger.ln_q": (f"{here}.projector.norm",),
        "visual.merger.mlp.0": (f"{here}.projector.up",),
        "visual.merger.mlp.2": (f"{here}.projector.down",),
    }
    parts = {"norm1": ("attention_norm",), "norm2": ("mlp_norm",), "attn.proj": ("attention.out",),
             "attn.qkv": ("attention.q", "attention.k", "attention.v"), "mlp.fc1": ("mlp.up",), "mlp.fc2": ("mlp.down",)}  # fmt: skip
    for layer in range(vision.num_layers):
        at = f"{here}.layers.{layer}"
        for name, ours in parts.items():
            names[f"visual.blocks.{layer}.{name}"] = tuple(f"{at}.{part}" for part in ours)
    return names


def unfolded(vision: VisionSection) -> dict[str, tuple[int, ...]]:
    """Return the shape of the patches' weights, whose frames are a dim of their own there."""
    shape = (vision.hidden_size, CHANNELS, FRAMES, vision.patch_size, vision.patch_size)
    return {"visual.patch_embed.proj.weight": shape}
