"""Shrinking of a job's model, with its features kept.

Kept are the family, ties, biases, norms, the optimizer and the legal tensor-parallel degrees up to 8. Kept
too are query heads per key-value head, the parities of head width and depth, and the ratio of FFN to width.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from raymega.config.schema import MlaSection
from raymega.errors import ConfigError
from raymega.plan.layers.encoder_decoder import raw_length
from raymega.plan.memory.state_bytes import count_parameters
from raymega.verify.job_draft import Draft
from raymega.verify.shrinking.layer_sizes import cut_layer_sizes

MAX_SEQ_LEN = 32
MAX_VOCAB = 512
SHORT_TEXT_DENSITY = 0.4
MAX_LAYERS = 8
MAX_TP = 8
MAX_EXPERTS, MAX_GROUPS, MAX_CHOICES = 8, 4, 3
MOST_HEADS = 40
STATE_WIDTH = 8
MAX_GRID, MAX_PATCH, MAX_TOWER_LAYERS, MAX_TOWER_HEADS = 2, 4, 3, 2
"""Most patches along an image's edge, pixels along a patch's, and blocks and heads of a vision tower."""
HEAD_WIDTHS = (64, 32, 16, 8, 4, 2)


def shrink_model(draft: Draft, max_params: int) -> None:
    """Cut positions, vocabulary, experts, depth, heads and head width in turn until the model fits."""
    cuts: tuple[Callable[[Draft], None], ...] = (
        _cut_positions,
        _cut_vocabulary,
        _cut_experts,
        _cut_depth,
        _cut_heads,
        _cut_states,
        *(_cut_head_width(width) for width in HEAD_WIDTHS),
        _cut_depth_of_experts,
    )
    for cut in cuts:
        if count_parameters(draft.job().model) <= max_params:
            return
        cut(draft)
        cut_layer_sizes(draft, _like, _head_degrees)
    smallest = count_parameters(draft.job().model)
    if smallest > max_params:
        raise ConfigError(
            fact=f"--max-params {max_params:,}",
            rule=f"the smallest model with this job's features has {smallest:,} parameters",
            remedy=f"use {smallest:,} or more",
        )


def cut_streams(draft: Draft) -> None:
    """Give each side half of the shrunk row, and a row the text that fits and has several spans."""
    job = draft.job()
    decoder = job.data.seq_len // 2
    density = max(job.data.span_corruption.noise_density, SHORT_TEXT_DENSITY)
    spans = job.data.span_corruption.model_copy(update={"noise_density": density})
    draft.set("model.encoder_decoder.decoder_seq_len", decoder)
    draft.set("data.span_corruption.noise_density", density, "a short text has several spans then")
    text = raw_length(spans, job.data.seq_len - decoder, decoder)
    draft.set("data.span_corruption.text_seq_len", text, "it is what becomes a row")


def cut_images(draft: Draft) -> None:
    """Cut images so that several fit into a shrunk row, and the tower to a few narrow blocks with the same parts."""
    vision = draft.job().model.vision
    merge = vision.spatial_merge_size
    patch = min(vision.patch_size, MAX_PATCH)
    edge, square = min(isqrt(vision.num_patches), MAX_GRID), patch * merge
    layers = min(vision.num_layers, MAX_TOWER_LAYERS)
    heads = min(vision.num_heads, MAX_TOWER_HEADS)
    smaller = {
        "patch_size": patch, "num_layers": layers, "num_heads": heads,
        # a head no wider than before, which the tower's rotation may ask a multiple of
        "hidden_size": heads * min(vision.hidden_size // vision.num_heads, STATE_WIDTH),
        "ffn_hidden_size": min(vision.ffn_hidden_size, 2 * heads * STATE_WIDTH),
        # as many blocks behind the projected one as fit
        "feature_layer": max(1 - layers, min(-1, vision.used_layers - vision.num_layers - 1)),
    }  # fmt: skip
    if vision.max_pixels:
        # as many tokens at most as a square of that edge, in several shapes
        smaller |= {"max_pixels": (edge * square) ** 2, "min_pixels": 0, "mean_pixels": 0}
    else:
        smaller["image_size"] = edge * square
    # a tower that is as deep as before keeps its projected block
    if vision.num_layers == layers:
        smaller.pop("feature_layer")
    for name, number in smaller.items():
        draft.set(f"model.vision.{name}", number)


def cut_sections(draft: Draft) -> None:
    """Let the sections of M-RoPE be all pairs of a narrower head again."""
    model = draft.job().model
    pairs, sections = model.rope_width // 2, model.vision.mrope_section
    if sections and sum(sections) != pairs:
        row = pairs * 3 // 8
        draft.set("model.vision.mrope_section", (pairs - 2 * row, row, row))


def _cut_positions(draft: Draft) -> None:
    draft.set("model.max_positions", min(draft.job().model.max_positions, 2 * MAX_SEQ_LEN))


def _cut_vocabulary(draft: Draft) -> None:
    """Cut the vocabulary to rows that the same degrees divide, with padding if the job has it."""
    model = draft.job().model
    rows = _like(model.table_rows, min(model.table_rows, MAX_VOCAB))
    if rows == model.table_rows:
        return
    padding = min(model.table_rows - model.vocab_size, rows // 2)
    draft.set("model.vocab_size", rows - padding)
    draft.set(
        "model.make_vocab_size_divisible_by",
        rows,
        "so that tp cuts the table as in the whole model",
    )
    if draft.job().model.vision.image_token_id >= rows - padding:
        draft.set("model.vision.image_token_id", rows - padding - 1)
    # special tokens of masks move to the end of what is left
    masking = draft.job().data.masking
    for place, name in enumerate(("mask_token_id", "cls_token_id", "sep_token_id")):
        if getattr(masking, name) >= rows - padding:
            draft.set(f"data.masking.{name}", rows - padding - 1 - place)
    spans = draft.job().data.span_corruption
    if spans.first_sentinel_id >= rows - padding:
        draft.set("data.span_corruption.first_sentinel_id", rows - padding - 1)


def _cut_experts(draft: Draft) -> None:
    """Cut experts, their groups and top_k; the same degrees divide the number of experts.

    Routing stays a choice: top_k stays below the number of experts, and groups keep several experts.
    """
    moe = draft.job().model.moe
    if not moe.num_experts:
        return
    is_choice = moe.top_k < moe.num_experts
    choices = min(moe.top_k, MAX_CHOICES)
    least_group = min(2, moe.num_experts // moe.n_group)

    def holds(experts: int) -> bool:
        groups = _groups_of(experts, moe.n_group)
        is_grouped = groups > 1 and experts // groups >= least_group
        return experts >= choices + is_choice and (is_grouped or moe.n_group == 1)

    near = min(moe.num_experts, MAX_EXPERTS)
    experts = _like(moe.num_experts, near, holds)
    groups = _groups_of(experts, moe.n_group)
    topk_group = min(moe.topk_group, max(1, groups - 1))
    draft.set("model.moe.num_experts", experts)
    draft.set("model.moe.n_group", groups)
    draft.set("model.moe.topk_group", topk_group)
    if groups == 1 or experts // groups < 2:
        draft.set("model.moe.group_score", "max")
    reach = experts // groups * topk_group
    draft.set("model.moe.top_k", min(choices, reach) if is_choice else experts)


def _groups_of(experts: int, most: int) -> int:
    """Return a number of groups that divides ``experts``, near MAX_GROUPS and at most ``most``."""
    few = range(min(most, MAX_GROUPS), 1, -1)
    return next((n for n in (*few, *range(MAX_GROUPS + 1, most + 1)) if experts % n == 0), 1)


def _cut_depth(draft: Draft) -> None:
    _keep_layers(draft, MAX_LAYERS)


def _cut_depth_of_experts(draft: Draft) -> None:
    """Halve the depth of models with experts, as the last resort: their blocks are large."""
    if draft.job().model.moe.num_experts:
        _keep_layers(draft, MAX_LAYERS // 2)


def _keep_layers(draft: Draft, most: int) -> None:
    """Keep at most ``most`` layers, of the same parity, some with experts if any had them."""
    model = draft.job().model
    layers = min(model.num_layers, most - model.num_layers % 2)
    draft.set("model.num_layers", layers)
    own = model.encoder_decoder.num_encoder_layers
    if own and layers < model.num_layers:
        kept = max(1, min(layers - 1, own * layers // model.num_layers))
        draft.set("model.encoder_decoder.num_encoder_layers", kept)
    kinds = model.attention.layer_types
    if len(kinds) > layers:  # the first ones, and one of each kind
        others = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:layers]]
        left = (*kinds[: layers - len(others)], *others)
        draft.set("model.attention.layer_types", left, "one kind a layer at most")
    for name, listed in model.layer_sizes:
        draft.set(f"model.layer_sizes.{name}", listed[:layers], "one size a layer at most")
    if draft.job().precision.fp8 != "none":
        end_blocks = min(draft.job().precision.fp8_end_blocks, (layers - 1) // 2)
        draft.set("precision.fp8_end_blocks", end_blocks, "some block must be left for fp8")
    if model.moe.num_experts and not any(map(model.holds_experts, range(layers))):
        draft.set("model.moe.first_k_dense_replace", 1)
        draft.set("model.moe.layer_freq", min(model.moe.layer_freq, 2))


def _cut_heads(draft: Draft) -> None:
    model = draft.job().model
    ratio = model.num_heads // model.kv_heads
    # More than MAX_TP only where no fewer can be cut as the job's can, as 40 for 160.
    more = range(MAX_TP + 1, MOST_HEADS // ratio + 1)
    fewer = [d for d in (*range(MAX_TP, 0, -1), *more) if model.kv_heads % d == 0]
    wanted = _head_degrees(model.kv_heads, ratio)
    kv_heads = next((d for d in fewer if _head_degrees(d, ratio) == wanted), fewer[0])
    _resize(draft, heads=kv_heads * ratio, kv_heads=kv_heads, head_width=model.head_width)


def _head_degrees(kv_heads: int, ratio: int) -> list[int]:
    """Return the tp degrees that divide ``kv_heads`` heads with ``ratio`` query heads each."""
    return [
        tp
        for tp in range(1, MAX_TP + 1)
        if kv_heads * ratio % tp == 0 and 0 in (kv_heads % tp, tp % kv_heads)
    ]


def _cut_states(draft: Draft) -> None:
    """Cut the heads of gated delta nets, with their ratio and the degrees that divide them, and their widths."""
    sizes = draft.job().model.linear_attention
    if not sizes.num_key_heads:
        return
    heads = _like(sizes.num_key_heads, min(sizes.num_key_heads, MAX_TP))
    ratio = sizes.num_value_heads // sizes.num_key_heads
    smaller = {
        "num_key_heads": heads, "num_value_heads": heads * ratio,
        "key_head_dim": min(sizes.key_head_dim, STATE_WIDTH), "value_head_dim": min(sizes.value_head_dim, STATE_WIDTH),
    }  # fmt: skip
    for name, number in smaller.items():
        draft.set(f"model.linear_attention.{name}", number)


def _cut_head_width(width: int) -> Callable[[Draft], None]:
    def cut(draft: Draft) -> None:
        model = draft.job().model
        wanted = min(model.head_width, width - model.head_width % 2)
        _resize(draft, heads=model.num_heads, kv_heads=model.kv_heads, head_width=wanted)

    return cut


def _resize(draft: Draft, *, heads: int, kv_heads: int, head_width: int) -> None:
    """Set heads and width, and scale feed-forward layers with the width."""
    model = draft.job().model
    width = max(
        1, round(model.hidden_size * heads * head_width / (model.num_heads * model.head_width))
    )
    if model.mla.kv_lora_rank:
        width = _width_for_ffn(model.ffn_hidden_size, model.hidden_size, near=width)
    draft.set("model.num_heads", heads)
    if model.head_dim != "hidden_size / num_heads":
        draft.set("model.head_dim", head_width)
    if model.num_kv_heads != "num_heads":
        draft.set("model.num_kv_heads", kv_heads)
    draft.set("model.hidden_size", width)
    widths = {
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.moe.shared_expert_intermediate_size": model.moe.shared_expert_intermediate_size,
    }
    if model.moe.intermediate_size != "ffn_hidden_size":
        widths["model.moe.intermediate_size"] = model.moe.intermediate_size
    base = model.mup_base_width
    draft.set("model.mup_base_width", base and max(1, round(base * width / model.hidden_size)))
    for field, number in widths.items():
        draft.set(field, number and _like(number, round(number * width / model.hidden_size)))
    if model.mla.kv_lora_rank:
        _resize_latents(draft, model.mla, head_width / model.head_width, width / model.hidden_size)


def _width_for_ffn(ffn_hidden_size: int, width: int, *, near: int) -> int:
    """Return the width near ``near`` that best keeps the FFN's ratio, for latent attention."""

    def drift(small: int) -> float:
        return abs(
            _like(ffn_hidden_size, round(ffn_hidden_size * small / width))
            * width
            / small
            / ffn_hidden_size
            - 1
        )

    return min(range(max(1, near * 3 // 4), near + 1), key=lambda n: (round(drift(n), 2), near - n))


def _resize_latents(
    draft: Draft, mla: MlaSection, share_of_head: float, share_of_width: float
) -> None:
    """Scale the parts of a head with the head, and latents with the width."""
    rope = max(2, 2 * round(mla.qk_rope_head_dim * share_of_head / 2))
    nope = max(1, round(mla.qk_nope_head_dim * share_of_head)) if mla.qk_nope_head_dim else 0
    values = max(1, round(mla.v_head_dim * share_of_head))
    smaller = {
        "kv_lora_rank": max(1, round(mla.kv_lora_rank * share_of_width)),
        "q_lora_rank": max(1, round(mla.q_lora_rank * share_of_width)) if mla.q_lora_rank else 0,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": min(values, nope + rope),
    }
    if mla.index_n_heads:  # short rows are chosen whole by any index_topk
        smaller |= {"index_n_heads": min(2, mla.index_n_heads), "index_head_dim": nope + rope}
    for name, number in smaller.items():
        draft.set(f"model.mla.{name}", number)


def _like(number: int, near: int, holds: Callable[[int], bool] = lambda _number: True) -> int:
    """Return the number nearest to ``near``, preferably below, that the same degrees as ``number`` divide.

    ``holds`` is a further condition; if nothing fulfils it, return ``number`` itself.
    """
    degrees = range(2, MAX_TP + 1)
    wanted = [number % degree == 0 for degree in degrees]
    span = 840  # least common multiple of the degrees 2 to 8: any pattern recurs within it
    nearest = sorted(
        range(max(1, near - span), near + span), key=lambda n: (n > near, abs(n - near))
    )
    alike = (n for n in nearest if [n % degree == 0 for degree in degrees] == wanted)
    return next(filter(holds, alike), number)
