"""Shows the throughput of each step as Ray metrics, which Ray's agents hand to Prometheus."""

from __future__ import annotations

from functools import cache

import ray
from ray.util.metrics import Counter

from raymega.curate.tally import Tally


def report_speed(tally: Tally) -> None:
    """Add the counts of a finished group; without Ray nothing is done."""
    if not ray.is_initialized():
        return
    for name, step in tally.steps.items():
        for kind, value in (
            ("text_bytes", step.bytes_in),
            ("documents", step.documents_in),
            ("cpu_seconds", step.cpu_s),
        ):
            if value:
                _counter(kind).inc(value, tags={"step": name})


@cache
def _counter(kind: str) -> Counter:
    text = f"{kind.replace('_', ' ')} that came to each step of `raymega data curate`"
    return Counter(f"raymega_curate_{kind}", description=text, tag_keys=("step",))
