"""Actors and placement groups that a run left on a Ray cluster, and their removal."""

import os
import signal
import time
from contextlib import suppress

import ray
from ray._private import state
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group


def leftovers(patience_s=60.0):
    """Return the ids of actors and placement groups that still live after ``patience_s`` seconds."""
    deadline_s = time.monotonic() + patience_s
    # Ray ends actors in its own time
    while (left := _living()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def clear_away(patience_s=60.0):
    """End all actors and placement groups of the connected local cluster, and return those still left.

    By what Ray lists, and not by handles: those of a test that failed live on in its traceback, and a
    placement group has none.
    """
    for group in _groups():
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))
    for actor in _actors():
        # an actor that never started has no process
        if actor["Pid"]:
            with suppress(ProcessLookupError):
                os.kill(actor["Pid"], signal.SIGKILL)
    return leftovers(patience_s)


def _living():
    return [actor["ActorID"] for actor in _actors()] + _groups()


def _actors():
    return [actor for actor in state.actors().values() if actor["State"] != "DEAD"]


def _groups():
    groups = ray.util.placement_group_table().values()
    return [g["placement_group_id"] for g in groups if g["state"] != "REMOVED"]
