"""State in words how far a prediction can be trusted; every prediction is printed with it.

The figures are those that ``benchmarks/planner.py`` prints for runs that no constant was fitted to.
"""

from __future__ import annotations

from raymega.plan.hardware.catalog import CATALOGUE, Accelerator

_BY_DEVICE = {
    "a100": "Expect 5 % of error in time, 10 % at the most in nine of ten cases: so it was on published "
    "runs that no constant was fitted to.",
    "h100": "Expect 8 % of error in time, 20 % at the most in nine of ten cases, more with sharded parameters: "
    "so it was on published runs that no constant was fitted to.",
    "h100-96gb": "Expect 5 % of error in time, 16 % at the most, and with context parallelism steps that take 15 "
    "to 70 % longer: so it was on the runs of one system, the only ones published on this GPU.",
    "b200": "Expect 6 % of error in time for dense models in fp8: so it was on eight runs of one source, "
    "the constants being the H100's. Nothing else on this GPU has been compared.",
    "cpu": "Expect the order of layouts, not their seconds: the entry is of one machine. `raymega doctor "
    "JOB.yaml --calibrate FILE.yaml` measures yours.",
}
_UNCOMPARED = "No published run on this GPU has been compared: the constants are the H100's."


def expected_error(device: Accelerator) -> str:
    """Return how far to trust a prediction for ``device``, in words."""
    if device.name in CATALOGUE:
        return _BY_DEVICE.get(device.name, _UNCOMPARED)
    return device.known_error or (
        "No run on this accelerator has been compared: its figures are the file's."
    )
