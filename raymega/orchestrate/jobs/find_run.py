"""Finds a run that is at work on a cluster by its name: asks one of its workers where it lies.

It joins a cluster and starts nothing there.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util import list_named_actors

from raymega.errors import ConfigError, Fault
from raymega.session import close_session, open_session

ANSWER_TIMEOUT_S = 30.0
FIRST_WORKER = "rank0-"


def find_run(name: str, *, address: str) -> str:
    """Folder of the run ``name`` in its store.

    Args:
        name: The job's ``run.name``.
        address: ``auto`` or ``HOST:PORT`` of the cluster, as for training.

    Raises:
        ConfigError: No cluster answers, or no run of that name is at work on it, or several are.
    """
    open_session(address, is_joining=True)
    try:
        uris = sorted({uri for worker in _workers(name) if (uri := _run_uri(worker))})
    finally:
        close_session()
    if len(uris) != 1:
        raise ConfigError(_not_one(name, uris))
    return uris[0]


def _workers(name: str) -> list[dict[str, str]]:
    """The first workers of each run of that name, or all when a spare has taken the place of one.

    Names are RUN/ATTEMPT/RANK-...; see placement_slots.actor_name.
    """
    listed: list[Any] = list_named_actors(all_namespaces=True)
    found = [actor for actor in listed if actor["name"].startswith(f"{name}/a")]
    first = [actor for actor in found if f"/{FIRST_WORKER}" in actor["name"]]
    return first or found


def _run_uri(worker: dict[str, str]) -> str:
    """What the worker says, or nothing when it is gone."""
    try:
        actor = ray.get_actor(worker["name"], namespace=worker["namespace"])
        return str(ray.get(actor.run_uri.remote(), timeout=ANSWER_TIMEOUT_S))
    except (RayActorError, GetTimeoutError, ValueError):  # ValueError: no actor of that name
        return ""


def _not_one(name: str, uris: list[str]) -> Fault:
    fact = (
        f"runs {name!r} are at work in {', '.join(uris)}" if uris else f"no run {name!r} is at work"
    )
    return Fault(
        fact=f"{fact} on this cluster",
        rule="a name must mean one run that is training",
        remedy="give the run's own folder, <checkpoint.uri>/<run.name>, instead of its name; it "
        "needs no address",
    )
