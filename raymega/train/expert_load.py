"""What a step's routing was, as metrics and as a report: how even, what was dropped, how sure.

The sums are the routers', over all ranks; which numbers follow from counts is tracking.expert_load's.
"""

from __future__ import annotations

from collections.abc import Mapping

from raymega.events import ExpertLoads
from raymega.model.moe.load_balancing import Load
from raymega.tracking.expert_load import load_metrics


def expert_metrics(loads: Mapping[int, Load]) -> dict[str, float]:
    """Metrics of every layer with experts; of none that saw no token."""
    metrics: dict[str, float] = {}
    for layer, load in loads.items():
        counts = load.counts.tolist()
        if not sum(counts):
            continue
        metrics |= load_metrics(layer, counts)
        metrics |= {
            f"moe/drop_rate/{layer}": 1 - load.kept / sum(counts),
            f"moe/router_entropy/{layer}": load.entropy / load.tokens,
            f"moe/router_loss/{layer}": (load.balance + load.z) / load.tokens,
        }
    return metrics


def expert_loads(loads: Mapping[int, Load], *, step: int) -> ExpertLoads:
    """Tokens by layer and expert."""
    tokens = {layer: tuple(load.counts.tolist()) for layer, load in loads.items()}
    return ExpertLoads(step=step, tokens=tokens)
