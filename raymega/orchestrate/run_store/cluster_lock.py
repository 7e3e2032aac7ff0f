"""One driver at a time on one cluster, by a named actor: for stores on which a lease keeps nobody out.

It ends with the driver's process. It knows nothing of drivers on other clusters, and nothing expires:
a driver that is stopped keeps it. What keeps two drivers apart everywhere is lease.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from raymega.checkpoint.format.epochs import LeaseHolder
from raymega.errors import Fault, LeaseError
from raymega.orchestrate.run_store.lease import Lease, supports_conditional_put

log = logging.getLogger(__name__)

NAMESPACE = "raymega"
ANSWER_TIMEOUT_S = 30.0


class HolderActor:
    """Its name is the mutex."""

    def __init__(self, holder: LeaseHolder) -> None:
        self._holder = holder

    def holder(self) -> LeaseHolder:
        """Whose it is."""
        return self._holder


@contextmanager
def hold_cluster_lock(lease: Lease) -> Iterator[None]:
    """Keep other drivers of this cluster from the run during the body, where its store does not.

    Raises:
        LeaseError: Another driver of this cluster has the run.
        StorageError: The store fails.
    """
    if supports_conditional_put(lease.store):
        yield
        return
    uri = lease.store.uri
    log.warning(
        "%s lets an object be created twice, so that no lease there keeps a second driver out: a named "
        "actor keeps drivers of this cluster apart, and nothing those of other clusters; two of them "
        "would both train, and only the checkpoints of one would count",
        uri,
    )
    actor = _take(uri, lease.holder)
    try:
        yield
    finally:
        ray.kill(actor)


def _take(run_uri: str, holder: LeaseHolder) -> ActorHandle[Any]:
    name = f"driver-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": 0}
    try:
        actor = ray.remote(HolderActor).options(**options).remote(holder)
    except ValueError:  # Ray's word for a name that is taken
        raise LeaseError(_taken_fault(run_uri, name)) from None
    return cast(ActorHandle[Any], actor)


def _taken_fault(run_uri: str, name: str) -> Fault:
    return Fault(
        fact=f"the run in {run_uri} has a driver on this cluster: {_holder_of(name)}",
        rule="a run has one driver at a time, and its store cannot tell two apart",
        remedy="stop that one and start this job again, or take another run.name",
    )


def _holder_of(name: str) -> str:
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        return str(ray.get(actor.holder.remote(), timeout=ANSWER_TIMEOUT_S))
    except (RayActorError, GetTimeoutError, ValueError):  # ValueError: it has just ended
        return "one that does not answer"
