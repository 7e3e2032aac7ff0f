"""One fault of each class in one run on a blend: worker, node, store, driver; and it is the same run."""

import pytest

from raymega.chaos.faults import parse_faults
from tests.support.drills import PATIENT

pytestmark = pytest.mark.ray

BLEND = (
    "data.path=none", "data.sources=[{path: synthetic:a, weight: 0.6}, {path: synthetic:b, weight: 0.4}]",
    "data.stages=[{from_tokens: 2208, sources: [{path: synthetic:b, weight: 0.7}, {path: synthetic:c}]}]",
)  # fmt: skip
"""Another blend from sequence 69 on, in the middle of step 5."""


def test_run_lives_through_a_fault_of_each_class(drills, record_property):
    faults = parse_faults("kill-worker@3,raise@snapshot:5,kill-node@6,kill-driver@7,disk-full@8")
    verdict = drills(faults, *PATIENT, *BLEND)
    assert verdict.faults == [], "; ".join(verdict.faults)
    kinds = [each.injected.fault.kind for each in verdict.incidents]
    assert kinds == ["kill-worker", "raise", "kill-node", "kill-driver", "disk-full"]
    by_kind = {each.injected.fault.kind: each for each in verdict.incidents}
    assert by_kind["kill-worker"].lost_steps <= 1
    assert by_kind["raise"].source == "memory", (
        "the first fault may come before a snapshot is whole"
    )
    assert by_kind["kill-driver"].source == "store", "what is in memory ends with the driver"
    # where outages overlap the time counts for the earlier fault, and a node's loss may be noticed only at the driver's death
    driver, earlier = by_kind["kill-driver"], verdict.incidents[: kinds.index("kill-driver")]
    is_inside = any(_recovered_s(driver) <= _recovered_s(each) for each in earlier)
    assert "kill-worker" in verdict.sheet.by_cause
    assert "kill-driver" in verdict.sheet.by_cause or is_inside
    assert sum(verdict.sheet.by_cause.values()) == pytest.approx(verdict.sheet.wall_s, rel=0.05)
    record_property("by_cause", str(verdict.sheet.by_cause))


def _recovered_s(incident):
    return incident.injected.at_s + incident.recovery_s
