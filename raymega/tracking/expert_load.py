"""How evenly experts are loaded: from tokens by expert to metrics, and to a warning in words.

Pure numbers of one step; how they are gathered is training's, how they are drawn expert_heat's.
"""

from __future__ import annotations

from collections.abc import Sequence

STARVED_SHARE = 0.1
"""An expert with less than this share of an even load is starved."""
COLLAPSED_SHARE = 0.25
"""Routing collapses where at least this share of a layer's experts is starved."""
MIN_MEAN_TOKENS = 10.0
"""With fewer tokens an expert in the mean, an empty one is chance."""
MAX_NAMED = 8


def starved_experts(counts: Sequence[float]) -> tuple[int, ...]:
    """Numbers of the experts that hardly any token reaches."""
    mean = sum(counts) / len(counts)
    if mean < MIN_MEAN_TOKENS:
        return ()
    return tuple(n for n, count in enumerate(counts) if count < STARVED_SHARE * mean)


def is_collapsed(counts: Sequence[float]) -> bool:
    """Whether so many experts are starved that the layer wastes them."""
    return len(starved_experts(counts)) >= COLLAPSED_SHARE * len(counts)


def load_metrics(layer: int, counts: Sequence[float]) -> dict[str, float]:
    """Of one layer that has routed some tokens."""
    mean = sum(counts) / len(counts)
    return {
        f"moe/max_load/{layer}": max(counts) / mean,
        f"moe/min_load/{layer}": min(counts) / mean,
        f"moe/starved_share/{layer}": len(starved_experts(counts)) / len(counts),
    }


def collapse_warning(layer: int, experts: Sequence[int], step: int) -> str:
    """A sentence that names the layer and its starved experts."""
    is_one = len(experts) == 1
    return (
        f"Routing collapses in layer {layer} at step {step}: expert{'' if is_one else 's'} "
        f"{_names(experts)} {'gets' if is_one else 'get'} less than {STARVED_SHARE:.0%} of an even load."
    )


def _names(experts: Sequence[int]) -> str:
    shown = ", ".join(map(str, experts[:MAX_NAMED]))
    more = len(experts) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
