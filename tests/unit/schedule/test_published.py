"""Simulated schedules against the zero-bubble paper's measurements (arXiv 2401.10241, tables 3 to 5).

The paper gives the profiled times of F, B, W and of a message, throughput on A100s, and the bubble
rate that follows from the times.
"""

import pytest

from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import make_schedule

# By parameters: milliseconds of F, B, W and a message.
TIMES = {
    "1.5B": (18.522, 18.086, 9.337, 0.601),
    "6.2B": (29.718, 29.444, 19.927, 0.527),
    "14.6B": (11.347, 11.248, 8.132, 0.377),
    "28.3B": (10.419, 10.207, 7.715, 0.408),
}
# Model, ranks, chunks of 1F1B-I, micro-batches; samples per second and GPU of each schedule.
MEASURED = [
    ("1.5B", 8, 3, 24, {"zb_h2": 14.5, "interleaved": 13.1, "zb_h1": 12.9, "1f1b": 11.8}),
    ("1.5B", 8, 3, 64, {"zb_h2": 14.9, "zb_h1": 14.2, "interleaved": 13.9, "1f1b": 13.6}),
    ("6.2B", 8, 4, 32, {"zb_h2": 4.35, "interleaved": 4.08, "zb_h1": 4.00, "1f1b": 3.70}),
    ("14.6B", 16, 3, 48, {"zb_h2": 1.81, "zb_h1": 1.61, "interleaved": 1.54, "1f1b": 1.40}),
    ("14.6B", 16, 3, 128, {"zb_h2": 1.85, "zb_h1": 1.76, "interleaved": 1.66, "1f1b": 1.64}),
    ("28.3B", 32, 2, 128, {"zb_h2": 1.00, "zb_h1": 0.90, "interleaved": 0.85, "1f1b": 0.80}),
]
HANDLING_MS = 0.25
"""Of a rank for a message: what Megatron's synchronous transfers cost, as their figures say."""


def _simulate(name, model, *, pp, m, chunks=1, handling=0.0, has_transfer=True):
    f, b, w, message = (time / chunks for time in TIMES[model])
    durations = Durations(
        forward=f,
        backward=b + w,
        weight=w,
        transfer=message * chunks if has_transfer else 0.0,
        handling=handling,
    )
    sizes = Sizes(pp=pp, num_micro_batches=m, chunks=chunks)
    return simulate(make_schedule(name, sizes), durations)


@pytest.mark.parametrize(("model", "pp", "chunks", "m", "measured"), MEASURED)
def test_schedules_are_ordered_as_they_were_measured(model, pp, chunks, m, measured):
    times = {
        name: _simulate(
            name, model, pp=pp, m=m, chunks=chunks if name == "interleaved" else 1,
            handling=HANDLING_MS, has_transfer=False,
        ).time
        for name in measured
    }  # fmt: skip
    assert sorted(times, key=times.get) == list(measured)


@pytest.mark.parametrize(
    ("name", "model", "pp", "m", "rate"),
    [
        ("1f1b", "1.5B", 8, 24, 0.2431),
        ("1f1b", "14.6B", 16, 48, 0.2552),
        ("1f1b", "28.3B", 32, 128, 0.2168),
        ("zb_h1", "1.5B", 8, 24, 0.1585),
        ("zb_h1", "14.6B", 16, 48, 0.1397),
    ],
)
def test_bubble_rate_is_the_papers(name, model, pp, m, rate):
    assert _simulate(name, model, pp=pp, m=m).bubble_rate == pytest.approx(rate, abs=5e-5)
