"""LLaVA: a language model of another family behind a vision tower of CLIP's or SigLIP's kind and a projector.

Its config.json holds those of both; its tensors are theirs, each behind a prefix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any

from raymega.config.schema import ModelSection
from raymega.config.vision.section import CHANNELS, CLIP_MEAN, CLIP_STD, VisionSection
from raymega.convert.huggingface.architectures import Config, alike, ours, theirs, unlike
from raymega.convert.huggingface.families.family import Names
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.layers.vision import FRAMES, VISION

LLAVA, CLASS = "llava", "LlavaForConditionalGeneration"
TEXT_PREFIX, TOWER_PREFIX = "language_model.", "vision_tower.vision_model."
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
TRAINING = ("image_mean", "image_std", "image_share", "initializer_range", "tensor_parallel")
"""Fields that config.json does not express: pixels are normalised before the network."""
_TYPES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_SIZES = {
    **alike("hidden_size", "image_size", "patch_size"),
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "layer_norm_eps": "norm_eps",
}
_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "initializer_range": 0.02, "num_channels": CHANNELS,
}  # fmt: skip
_TOWER_DEFAULTS: Mapping[str, Config] = {
    "clip": {**_BASE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip": {
        **_BASE,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
_TEXT_DEFAULTS: Mapping[str, Config] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
}
"""Sizes that a published text_config leaves out, by its model_type."""
_DEFAULTS = {
    "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True, "image_token_index": 32000,
}  # fmt: skip
_NORMALISED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_CURRENT = (
    (r"^model\.(?=language_model|vision_tower|multi_modal_projector)", ""),
    (r"^(?=lm_head\.)", TEXT_PREFIX),
    (rf"^{re.escape(TEXT_PREFIX)}(?!model\.|lm_head\.)", f"{TEXT_PREFIX}model."),
    (r"^vision_tower\.(?!vision_model\.)", TOWER_PREFIX),
)
"""Patterns of names that later releases write, and the first release's, which all of them read."""


def text_of(config: Config) -> dict[str, Any]:
    """Return the config.json of the language model, with the sizes that it leaves out."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise KeyError("text_config")
    # the first release says nothing: its text_config is Llama's
    kind = text.get("model_type", "llama")
    is_tied = bool(config.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    return {
        **_TEXT_DEFAULTS.get(kind, {}),
        **text,
        "model_type": kind,
        "tie_word_embeddings": is_tied,
    }


def vision_of(config: Config) -> VisionSection:
    """Return the vision section of a config.json.

    Raises:
        ConfigError: The tower or the projector has a setting that raymega does not reproduce.
        KeyError: There is no vision_config.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        raise KeyError("vision_config")
    kind = _TYPES.get(str(tower.get("model_type")))
    if kind is None:
        raise ConfigError(
            unlike(
                f"vision_config.model_type={tower.get('model_type')!r}",
                "a tower is CLIP's or SigLIP's",
            )
        )
    whole = {**_TOWER_DEFAULTS[kind], **{k: v for k, v in tower.items() if v is not None}}
    outer = {**_DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
    raise_faults(ConfigError, [*_faults(kind, whole, outer)])
    token = outer.get("image_token_id", outer["image_token_index"])
    # pixels behind the last whole patch are read by none: SigLIP's 384 are 27 patches of 14
    size, patch = whole["image_size"], whole["patch_size"]
    return VisionSection.model_validate(
        {
            **ours(_SIZES, whole),
            "image_size": size // patch * patch,
            "kind": kind,
            "norm_eps": float(whole["layer_norm_eps"]),
            "activation": _ACTIVATIONS[whole["hidden_act"]],
            "feature_layer": outer["vision_feature_layer"],
            "image_token_id": token,
            "image_mean": tuple(map(float, outer.get("image_mean", CLIP_MEAN))),
            "image_std": tuple(map(float, outer.get("image_std", CLIP_STD))),
        }
    )


def _faults(kind: str, tower: Config, config: Config) -> Iterator[Fault]:
    # CLIP's class token is left out of the features; SigLIP has none
    strategy = "default" if kind == "clip" else "full"
    wanted: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("projector_hidden_act", config["projector_hidden_act"], ("gelu",)),
        ("multimodal_projector_bias", config["multimodal_projector_bias"], (True,)),
        ("vision_feature_select_strategy", config["vision_feature_select_strategy"], (strategy,)),
        ("vision_config.hidden_act", tower["hidden_act"], tuple(_ACTIVATIONS)),
        ("vision_config.num_channels", tower["num_channels"], (CHANNELS,)),
        ("vision_config.attention_dropout", tower.get("attention_dropout", 0), (0,)),
        ("vision_config.vision_use_head", tower.get("vision_use_head", kind == "siglip"), (False,)),
    )
    for name, value, values in wanted:
        if value not in values:
            named = " or ".join(map(repr, values))
            yield unlike(f"{name}={value!r}", f"a {kind} tower is built with {named}")
    if not isinstance(config["vision_feature_layer"], int):
        yield unlike(
            f"vision_feature_layer={config['vision_feature_layer']!r}",
            "one layer's output is projected",
        )


def llava_config(model: ModelSection, text: Config, carried: Config) -> dict[str, Any]:
    """Return the config.json of a model that reads images, of that of its language model."""
    vision = model.vision
    types = {ours_: their for their, ours_ in _TYPES.items()}
    acts = {ours_: their for their, ours_ in _ACTIVATIONS.items()}
    # settings that the tower was imported with, such as projection_dim, are kept
    tower = {
        **(carried.get("vision_config") or {}),
        **theirs(_SIZES, vision),
        "model_type": types[vision.kind],
        "hidden_act": acts[vision.activation],
        "num_channels": CHANNELS,
        **({"vision_use_head": False} if vision.kind == "siglip" else {}),
    }
    outer = {name: value for name, value in carried.items() if name not in (*text, *TRAINING)}
    return {
        **outer,
        "architectures": [CLASS],
        "model_type": LLAVA,
        "text_config": {name: value for name, value in text.items() if name != "dtype"},
        "vision_config": tower,
        "image_token_index": vision.image_token_id,
        "image_seq_length": vision.num_patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": vision.feature_layer,
        "vision_feature_select_strategy": "default" if vision.has_class_token else "full",
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def with_pixels(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json with the mean and deviation by which the folder's preprocessor normalises pixels.

    Raises:
        ConfigError: The preprocessor's file is there, and cannot be read, or it does not resize images.
    """
    if "vision_config" not in config:
        return config
    path, files = folder / PROCESSOR, {}
    try:
        for path in (folder / PROCESSOR, folder / PREPROCESSOR):
            if path.is_file() and PREPROCESSOR not in files:
                files = separate_preprocessor({path.name: path.read_bytes()})
        if PREPROCESSOR not in files:
            return config
        found = json.loads(files[PREPROCESSOR])
        pixels = _pixels(found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            Fault(
                fact=f"{str(path)!r} cannot be read ({error})",
                rule="it says by which mean and deviation pixels are normalised",
                remedy="copy it again from where the weights are from",
            )
        ) from error
    if found.get("do_resize") is False:
        raise ConfigError(
            Fault(
                fact=f"{str(path)!r} has do_resize=false",
                rule="raymega resizes every image to what the tower reads",
                remedy='set "do_resize": true there, if the model may read such images',
            )
        )
    return config | pixels


def separate_preprocessor(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a model's files with the preprocessor in one of its own, which every release of transformers reads.

    From 5.0 on they write it into the processor's file, and read it there first.
    """
    processor = json.loads(files.get(PROCESSOR, b"{}"))
    inner = processor.pop("image_processor", None)
    if inner is None:
        return dict(files)
    parts = {PROCESSOR: processor, PREPROCESSOR: inner}
    return {**files, **{name: json.dumps(part, indent=2).encode() for name, part in parts.items()}}


def _pixels(found: Config) -> dict[str, tuple[float, ...]]:
    """Return the mean and deviation of pixels divided by 255 that make the numbers which a preprocessor makes."""
    told = {name: value for name, value in found.items() if value is not None}
    half = (0.5,) * CHANNELS
    is_siglip = str(told.get("image_processor_type")).startswith("Siglip")
    mean, std = (half, half) if is_siglip else (CLIP_MEAN, CLIP_STD)
    mean, std = told.get("image_mean", mean), told.get("image_std", std)
    if not told.get("do_normalize", True):
        mean, std = (0.0,) * CHANNELS, (1.0,) * CHANNELS
    # ((p f) - m) / s = (p / 255 - m / (255 f)) / (s / (255 f))
    factor = told.get("rescale_factor", 1 / 255) if told.get("do_rescale", True) else 1
    scale = 1 if isclose(255 * factor, 1) else 255 * factor
    if scale <= 0:
        raise ValueError(f"rescale_factor={factor}")

    def scaled(values: Any) -> tuple[float, ...]:
        each = (values,) * CHANNELS if isinstance(values, int | float) else values
        return tuple(float(value) / scale for value in each)

    return {"image_mean": scaled(mean), "image_std": scaled(std)}


def preprocessor(vision: VisionSection) -> dict[str, Any]:
    """Return the preprocessor_config.json of a model, by which a processor makes the pixels that it was trained on."""
    if vision.max_pixels:
        return {
            "image_processor_type": "Qwen2VLImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
            "resample": 3, "patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": FRAMES, **_stated(vision),
        }  # fmt: skip
    # the whole image as a square, which is what `raymega data prepare` makes
    size = {"height": vision.image_size, "width": vision.image_size}
    kind = "SiglipImageProcessor" if vision.kind == "siglip" else "CLIPImageProcessor"
    return {
        "image_processor_type": kind, "do_resize": True, "size": size, "do_center_crop": False, "do_rescale": True,
        "do_normalize": True, "resample": 3, **_stated(vision),
    }  # fmt: skip


def _stated(vision: VisionSection) -> dict[str, Any]:
    """Return what a preprocessor's file says of pixels, and of areas where images have several sizes."""
    found: dict[str, Any] = {
        "image_mean": list(vision.image_mean),
        "image_std": list(vision.image_std),
    }
    if vision.max_pixels:
        # a token at least, as smart_resize would else make nothing of a small image
        least, most = max(vision.min_pixels, vision.sizes.square**2), vision.max_pixels
        found |= {"min_pixels": least, "max_pixels": most}
        found["size"] = {"shortest_edge": least, "longest_edge": most}
    return found


def current_preprocessor(vision: VisionSection, carried: bytes) -> bytes:
    """Return a model's preprocessor_config.json: the ``carried`` one, unless the job has changed what it says."""
    try:
        found = json.loads(carried)
        sizes = [*_edges(found.get("size")), *_edges(found.get("crop_size"))]
    except (ValueError, AttributeError):
        return json.dumps(preprocessor(vision), indent=2).encode()
    # pixels behind the last whole patch are never read
    patch = max(1, vision.patch_size)
    if vision.has_positions and any(edge // patch * patch != vision.image_size for edge in sizes):
        return json.dumps(preprocessor(vision), indent=2).encode()
    now = _stated(vision)
    means = {name: list(value) for name, value in _pixels(found).items()}
    if all({**found, **means}.get(name) == value for name, value in now.items()):
        return carried
    # the numbers are those of pixels divided by 255
    now |= {name: value for name, value in _NORMALISED.items() if name in found}
    return json.dumps(found | now, indent=2).encode()


def _edges(size: object) -> list[int]:
    """Return the edges in pixels that a size of a preprocessor names: a number, or several by name."""
    named = [*size.values()] if isinstance(size, dict) else [size]
    return [edge for edge in named if isinstance(edge, int)]


def known_name(name: str) -> str:
    """Return the first release's name of a tensor of any release."""
    for pattern, instead in _CURRENT:
        name = re.sub(pattern, instead, name)
    return name


def vision_names(vision: VisionSection) -> Names:
    """Return their modules of tower and projector, and ours."""
    tower, here = TOWER_PREFIX.removesuffix("."), VISION
    names: dict[str, tuple[str, ...]] = {
        f"{tower}.embeddings.patch_embedding": (f"{here}.patches",),
        f"{tower}.embeddings.position_embedding": (f"{here}.positions",),
        f"{tower}.pre_layrnorm": (f"{here}.pre_norm",),
        f"{tower}.post_layernorm": (f"{here}.post_norm",),
        "multi_modal_projector.linear_1": (f"{here}.projector.up",),
        "multi_modal_projector.linear_2": (f"{here}.projector.down",),
    }
    parts = {f"self_attn.{name}_proj": f"attention.{name}" for name in ("q", "k", "v", "out")}
    parts |= {"layer_norm1": "attention_norm", "layer_norm2": "mlp_norm"}
    parts |= {"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}
    for layer in range(vision.num_layers):
        there, at = f"{tower}.encoder.layers.{layer}", f"{here}.layers.{layer}"
        names |= {f"{there}.{name}": (f"{at}.{part}",) for name, part in parts.items()}
    return names


CLASS_TOKEN = (f"{TOWER_PREFIX}embeddings.class_embedding", f"{VISION}.class_token.weight")
"""Name of CLIP's class token, which has no module of its own there, and ours."""
