"""Load balance of experts: metrics and the warning of a collapse, from the tokens of each expert in one step.

Pure functions. `train/train_statistics.py` gathers the counts, `tracking/run_charts.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

STARVED_SHARE = 0.1
"""Share of the mean load below which an expert counts as starved."""
COLLAPSED_SHARE = 0.25
"""Share of starved experts from which on the routing of a layer counts as collapsed."""
MIN_MEAN_TOKENS = 10.0
"""Mean tokens per expert below which none counts as starved: an empty one may be chance."""
MAX_NAMED = 8


def starved_experts(counts: Sequence[float]) -> tuple[int, ...]:
    """Return the indices of experts with less than STARVED_SHARE of the mean load."""
    mean = sum(counts) / len(counts)
    if mean < MIN_MEAN_TOKENS:
        return ()
    return tuple(n for n, count in enumerate(counts) if count < STARVED_SHARE * mean)


def is_collapsed(counts: Sequence[float]) -> bool:
    """Return whether at least COLLAPSED_SHARE of the experts is starved."""
    return len(starved_experts(counts)) >= COLLAPSED_SHARE * len(counts)


def load_metrics(layer: int, counts: Sequence[float]) -> dict[str, float]:
    """Return the metrics ``moe/...`` of a layer, from its token counts (not all zero)."""
    mean = sum(counts) / len(counts)
    return {
        f"moe/max_load/{layer}": max(counts) / mean,
        f"moe/min_load/{layer}": min(counts) / mean,
        f"moe/starved_share/{layer}": len(starved_experts(counts)) / len(counts),
    }


def collapse_warning(layer: int, experts: Sequence[int], step: int) -> str:
    """Return a sentence that names the layer and its starved experts."""
    is_one = len(experts) == 1
    return (
        f"Routing collapse in layer {layer} at step {step}: expert{'' if is_one else 's'} "
        f"{_names(experts)} {'gets' if is_one else 'get'} less than {STARVED_SHARE:.0%} of the mean load. "
        "While the router warms up this often mends itself; if it stays, raise "
        "model.moe.router_aux_loss_coef."
    )


def _names(experts: Sequence[int]) -> str:
    shown = ", ".join(map(str, experts[:MAX_NAMED]))
    more = len(experts) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
