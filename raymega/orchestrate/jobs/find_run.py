"""Finds the folder of a live run by its name: asks one of its workers on the cluster.

It connects to a running cluster and starts nothing there.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from raymega.errors import ConfigError, Fault
from raymega.session import close_session, open_session

ANSWER_TIMEOUT_S = 30.0
FIRST_WORKER = "rank0-"


def find_run(name: str, *, address: str) -> str:
    """Return the URI of the folder of the live run ``name``.

    Args:
        name: Name of the run, the job's ``run.name``.
        address: Address of the cluster, ``auto`` or ``HOST:PORT``, as for training.

    Raises:
        ConfigError: No cluster answers, or not exactly one run of that name is live on it.
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
    """Return the actors of rank 0 of each run of that name, or all actors of these runs if there are none.

    There are none when a spare has taken rank 0. Names are RUN/ATTEMPT/RANK-...; see
    placement_slots.actor_name.
    """
    # all namespaces, because each driver has an anonymous one of its own
    listed: list[Any] = list_named_actors(all_namespaces=True)
    found = [actor for actor in listed if actor["name"].startswith(f"{name}/a")]
    first = [actor for actor in found if f"/{FIRST_WORKER}" in actor["name"]]
    return first or found


def _run_uri(worker: dict[str, str]) -> str:
    """Return the run's folder as the worker knows it; empty if the worker is gone."""
    try:
        actor = ray.get_actor(worker["name"], namespace=worker["namespace"])
        return str(ray.get(actor.run_uri.remote(), timeout=ANSWER_TIMEOUT_S))
    except (RayError, ValueError):  # ValueError: no actor of that name
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
