"""What is left on a Ray cluster that a run should have cleared away."""

import time

import ray
from ray._private import state


def leftovers(patience_s=60.0):
    """Living actors and placement groups, after they had ``patience_s`` to go."""
    deadline_s = time.monotonic() + patience_s
    while (left := _living()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def _living():
    actors = [a["ActorID"] for a in state.actors().values() if a["State"] != "DEAD"]
    groups = ray.util.placement_group_table().values()
    return actors + [g["placement_group_id"] for g in groups if g["state"] != "REMOVED"]
