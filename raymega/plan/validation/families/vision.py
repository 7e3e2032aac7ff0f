"""Check the rules of models that read images: sizes of the tower, tokens of an image, and what has no images."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from raymega.config.attention import AttentionSection
from raymega.config.heads.section import HeadSection
from raymega.config.mla import MlaSection
from raymega.config.vision.augment import AugmentSection
from raymega.config.vision.section import VisionSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.validation.pipeline import listed_faults
from raymega.plan.validation.rule import broken_rows, reads

SIZES = ("image_size", "patch_size", "num_layers", "hidden_size", "num_heads", "ffn_hidden_size")
PLAIN, NO_CHANGES = VisionSection(), AugmentSection()
ROWS = "rows of images predict the next token of text"


@reads("model.vision")
def count_faults(vision: VisionSection) -> Iterator[Fault]:
    """Check that the tower's layers are few enough to be listed; other rules list them."""
    yield from listed_faults("vision.num_layers", vision.num_layers)


@reads("model.vision")
def idle_vision_faults(vision: VisionSection) -> Iterator[Fault]:
    """Check that no field of the section is set without a tower."""
    if vision.is_on:
        return
    for field, value in vision:
        if value != getattr(PLAIN, field):
            yield Fault(
                fact=f"model.vision.{field}={value} with model.vision.kind=none",
                rule="the model reads text alone, so it has no effect",
                remedy=f"leave model.vision.{field} out, or set model.vision.kind=clip",
            )


@reads("model.vision, data.seq_len")
def image_length_faults(vision: VisionSection, seq_len: int) -> Iterator[Fault]:
    """Check that an image is shorter than a row."""
    square, count = vision.sizes.square, vision.num_patches
    is_whole = square > 0 and vision.image_size % square == 0
    if vision.is_on and is_whole and count >= seq_len:
        half = max(1, seq_len // 2)
        smaller = f"image_size={isqrt(half) * square}"
        if vision.max_pixels:
            smaller = f"max_pixels={half * square**2}"
        yield Fault(
            fact=f"data.seq_len={seq_len}",
            rule=f"an image is {count} tokens{' at most' * (vision.max_pixels > 0)}, and some text has to follow it",
            remedy=f"set data.seq_len={2 * count} or more, or model.vision.{smaller} or less",
        )


@reads("model.vision vocab_size")
def vision_size_faults(vision: VisionSection, vocab_size: int) -> Iterator[Fault]:
    """Check the sizes of the tower, and the token of an image; a model section by itself has them, too."""
    if not vision.is_on:
        return
    # images of several sizes have no one
    missing = [name for name in SIZES[bool(vision.max_pixels) :] if not getattr(vision, name)]
    if missing:
        yield Fault(
            fact=f"model.vision.{missing[0]}=0 with model.vision.kind={vision.kind}",
            rule=f"a tower has all of {', '.join(SIZES)}",
            remedy=f"set model.vision.{missing[0]}, for example as the imported model's vision_config",
        )
        return
    # the smallest square of pixels that is a token
    square = vision.sizes.square
    edge, patch, token = vision.image_size, vision.patch_size, vision.image_token_id
    layers, used = vision.num_layers, vision.used_layers
    yield from broken_rows(
        (
            (
                edge % square > 0,
                f"model.vision.patch_size={patch} with spatial_merge_size={vision.spatial_merge_size}",
                f"{square} must divide model.vision.image_size={edge} (remainder {edge % square})",
                f"set model.vision.image_size={max(square, edge // square * square)}",
            ),
            (
                vision.hidden_size % vision.num_heads > 0,
                f"model.vision.num_heads={vision.num_heads}",
                f"it must divide model.vision.hidden_size={vision.hidden_size}",
                "set model.vision.num_heads=1, or a divisor",
            ),
            (
                not 1 <= used <= layers,
                f"model.vision.feature_layer={vision.feature_layer}",
                f"of model.vision.num_layers={layers} blocks it names one: 1 to {layers}, or -{layers} to -1",
                "set model.vision.feature_layer=-1",
            ),
            (
                not 0 <= token < vocab_size,
                f"model.vision.image_token_id={token}",
                f"it is one of the model's tokens, 0 to {vocab_size - 1}",
                "set it to the id that the tokenizer has for <image>",
            ),
            (
                vision.spatial_merge_size > 1 and vision.has_positions,
                f"model.vision.spatial_merge_size={vision.spatial_merge_size} with model.vision.kind={vision.kind}",
                "patches are merged before the projector of qwen2_vl alone",
                "set model.vision.spatial_merge_size=1, or model.vision.kind=qwen2_vl",
            ),
            (
                not vision.has_positions and vision.hidden_size % (4 * vision.num_heads) > 0,
                f"model.vision.num_heads={vision.num_heads} with model.vision.kind={vision.kind}",
                f"half of a head's feature pairs rotate by row and half by column, so {4 * vision.num_heads} must "
                f"divide model.vision.hidden_size={vision.hidden_size}",
                "set fewer heads, or a larger model.vision.hidden_size",
            ),
        )
    )


@reads("model.vision")
def several_size_faults(vision: VisionSection) -> Iterator[Fault]:
    """Check the areas of images of several sizes, and that the tower takes them; a model section by itself has them, too."""
    if not vision.is_on:
        return
    square, most, kind = vision.sizes.square, vision.max_pixels, vision.kind
    bounds = {"min_pixels": vision.min_pixels, "mean_pixels": vision.mean_pixels}
    yield from broken_rows(
        (
            (
                most > 0 and vision.has_positions,
                f"model.vision.max_pixels={most} with model.vision.kind={kind}",
                "its table of positions is of one size; qwen2_vl alone, which rotates by row and column, takes several",
                "set model.vision.image_size, and max_pixels=0",
            ),
            (
                most > 0 and vision.image_size > 0,
                f"model.vision.image_size={vision.image_size} with max_pixels={most}",
                "images have one size, or each has about its own",
                "set model.vision.image_size=0, or max_pixels=0",
            ),
            (
                0 < most < square**2,
                f"model.vision.max_pixels={most}",
                f"an image has a token at least, of {square} x {square} = {square**2} pixels",
                f"set model.vision.max_pixels={square**2} or more",
            ),
            *(
                (
                    value > most,
                    f"model.vision.{name}={value} with max_pixels={most}",
                    "it is at most the largest area"
                    if most
                    else "images have one size, so it has no effect",
                    f"set model.vision.{name}=0"
                    + f", or max_pixels={value}" * (not vision.has_positions),
                )
                for name, value in bounds.items()
            ),
        )
    )


@reads("model.vision family num_nextn_predict_layers mup_base_width head")
def vision_option_faults(
    vision: VisionSection, family: str, depth: int, mup: int, head: HeadSection
) -> Iterator[Fault]:
    """Check that the model has no option that one with images does not have."""
    if not vision.is_on:
        return
    parts, name = family_parts(family), f"model.vision.kind={vision.kind}"
    yield from broken_rows(
        (
            (
                not (parts.is_causal and parts.has_rope),
                f"model.family={family} with {name}",
                "images take the places of tokens in a decoder with RoPE",
                "set model.family=llama, or leave model.vision out",
            ),
            (
                depth > 0,
                f"model.num_nextn_predict_layers={depth} with {name}",
                f"{ROWS}, and no further one",
                "set model.num_nextn_predict_layers=0",
            ),
            (
                mup > 0,
                f"model.mup_base_width={mup} with {name}",
                "the tower's width is not scaled with the model's",
                "set model.mup_base_width=0",
            ),
            (head.is_on, f"model.head.kind={head.kind} with {name}", ROWS, "leave model.head out"),
        )
    )


@reads("model.vision, parallel.tp")
def tower_cut_faults(vision: VisionSection, tp: int) -> Iterator[Fault]:
    """Check that tp divides what it cuts of the tower."""
    if not (vision.is_on and vision.tensor_parallel):
        return
    for field in ("num_heads", "ffn_hidden_size"):
        rest = getattr(vision, field) % tp
        if rest:
            yield Fault(
                fact=f"model.vision.tensor_parallel=true with parallel.tp={tp}",
                rule=f"it must divide model.vision.{field}={getattr(vision, field)} (remainder {rest})",
                remedy="set model.vision.tensor_parallel=false, and tp ranks share images instead",
            )


@reads("model.vision, parallel.dynamic_cp, preference.loss_type")
def vision_run_faults(vision: VisionSection, is_dynamic: bool, pair_loss: str) -> Iterator[Fault]:
    """Check that the run has no option that rows with images do not have."""
    if not vision.is_on:
        return
    name = f"model.vision.kind={vision.kind}"
    yield from broken_rows(
        (
            (
                is_dynamic,
                f"parallel.dynamic_cp=true with {name}",
                "it places documents of text on ranks, without their images",
                "set parallel.dynamic_cp=false, and parallel.cp",
            ),
            (
                pair_loss != "none",
                f"preference.loss_type={pair_loss} with {name}",
                ROWS,
                "set preference.loss_type=none",
            ),
        )
    )


@reads("model.vision, data.augment, distillation.loss_type teacher")
def augment_faults(
    vision: VisionSection, augment: AugmentSection, loss: str, teacher: str
) -> Iterator[Fault]:
    """Check that changes of images have images, and bounds in order."""
    scale, ratio = augment.crop_scale, augment.crop_ratio
    is_stored = augment.is_on and loss != "none" and teacher == "stored"
    yield from broken_rows(
        (
            (
                augment != NO_CHANGES and not vision.is_on,
                "data.augment with model.vision.kind=none",
                "it changes images, and the model reads text alone",
                "leave data.augment out",
            ),
            (
                bool(scale) and not (len(scale) == 2 and scale[0] <= scale[1] <= 1),
                f"data.augment.crop_scale=[{', '.join(map(str, scale))}]",
                "it is the least and the largest share of an image's area, at most 1",
                "set data.augment.crop_scale=[0.5, 1.0]",
            ),
            (
                ratio[0] > ratio[1],
                f"data.augment.crop_ratio=[{', '.join(map(str, ratio))}]",
                "it is the least and the largest width over height",
                "set data.augment.crop_ratio=[0.75, 1.33]",
            ),
            (
                ratio != NO_CHANGES.crop_ratio and not scale,
                "data.augment.crop_ratio without crop_scale",
                "nothing is cut out, so it has no effect",
                "set data.augment.crop_scale=[0.5, 1.0]",
            ),
            (
                is_stored,
                "data.augment with distillation.teacher=stored",
                "a stored teacher has seen the images unchanged",
                "set distillation.teacher=live, or leave data.augment out",
            ),
        )
    )


@reads("model.vision hidden_size num_heads head_dim attention mla")
def mrope_faults(
    vision: VisionSection,
    width: int,
    heads: int,
    head_dim: int | str,
    attention: AttentionSection,
    mla: MlaSection,
) -> Iterator[Fault]:
    """Check that the sections of M-RoPE are three, and all of a head's rotated pairs."""
    sections = vision.mrope_section
    if not (vision.is_on and sections):
        return
    whole = width // heads if isinstance(head_dim, str) else head_dim
    pairs = int(whole * attention.partial_rotary_factor) // 2
    yield from broken_rows(
        (
            (
                len(sections) != 3 or sum(sections) != pairs,
                f"model.vision.mrope_section=[{', '.join(map(str, sections))}]",
                f"its three numbers, of time, row and column, add up to the {pairs} pairs of a head that RoPE rotates",
                f"set model.vision.mrope_section=[{pairs - 2 * (pairs * 3 // 8)}, {pairs * 3 // 8}, {pairs * 3 // 8}]",
            ),
            (
                mla.kv_lora_rank > 0 or attention.sliding_rope_theta > 0,
                f"model.vision.mrope_section with {'model.mla' if mla.kv_lora_rank else 'sliding_rope_theta'}",
                "M-RoPE rotates whole heads by one base",
                "set model.vision.mrope_section=[]",
            ),
        )
    )
