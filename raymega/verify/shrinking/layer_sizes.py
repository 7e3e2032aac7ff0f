"""Shrinks the sizes of a job that differ by layer, after those of the whole model."""

from __future__ import annotations

from collections.abc import Callable

from raymega.config.attention import LayerSizesSection
from raymega.verify.job_draft import Draft

Like = Callable[[int, int], int]
"""Function from a number and a smaller one near which its like is searched."""


def cut_layer_sizes(draft: Draft, like: Like, degrees: Callable[[int, int], list[int]]) -> None:
    """Scale the lists of ``model.layer_sizes`` as the model's own sizes were, and keep those the largest.

    Args:
        draft: Job whose own sizes are cut already.
        like: Function that finds a number with the same divisors.
        degrees: Function from key heads, and query heads of each, to the tp degrees that cut them.
    """
    model = draft.job().model
    sizes, count = model.layer_sizes, model.num_layers
    if not sizes.is_on:
        return
    # widths keep their ratio to the largest, which the model's own cut has set
    if widths := sizes.ffn_hidden_size:
        share = model.ffn_hidden_size / max(widths)
        new = [like(width, max(1, round(width * share))) for width in widths[:count]]
        _set(draft, "ffn_hidden_size", new)
    if not (sizes.num_heads or sizes.num_kv_heads):
        return
    # heads: pairs of query and key heads by layer, with the ratio and the degrees that the whole model's have
    before = draft.original["model"]
    heads, kv_heads = before["num_heads"], before["num_kv_heads"]
    whole = LayerSizesSection.model_validate(before["layer_sizes"])
    pairs = [
        (own.get("num_heads", 0), own.get("num_kv_heads", 0)) for own in map(whole.of, range(count))
    ]
    share, new_pairs = model.num_heads / heads, []
    for own_heads, own_kv in pairs:
        q = own_heads or heads
        kv = own_kv or (q if kv_heads == "num_heads" else kv_heads)
        wanted, near = degrees(kv, q // kv), max(1, round(kv * share))
        nearest = sorted(range(1, kv + 1), key=lambda n: (abs(n - near), n))
        small = next(n for n in nearest if degrees(n, q // kv) == wanted)
        new_pairs.append((small * (q // kv), small))
    _set(draft, "num_heads", [q for q, _ in new_pairs])
    # query heads that were alike may differ now, with key heads that keep their degrees
    if draft.job().model.layer_sizes.num_heads and not isinstance(model.head_dim, int):
        draft.set("model.head_dim", model.head_width, "heads of all layers have one width")
    if kv_heads != "num_heads":
        _set(draft, "num_kv_heads", [kv for _, kv in new_pairs])


def _set(draft: Draft, name: str, values: list[int]) -> None:
    # sizes that are alike, and were, need no list
    if getattr(draft.job().model.layer_sizes, name) or len(set(values)) > 1:
        draft.set(f"model.layer_sizes.{name}", tuple(values))
    draft.set(f"model.{name}", max(values), "the largest of its layers'")
