"""Probes every node of a connected cluster by small Ray tasks: versions, GPUs, clock, store.

It only reports what it finds; ``diagnostics/checks.py`` judges it.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymega.errors import Fault
from raymega.storage.registry import open_store

PACKAGES = ("raymega", "ray", "torch")
TOOL_TIMEOUT_S = 20.0
CLOCK_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Versions and GPUs of one node.

    Attributes:
        versions: Versions of python and of PACKAGES, by name; ``none`` for a package that is missing.
        gpus: Name and memory of each GPU that nvidia-smi lists.
        driver: Version of the GPU driver; empty without one.
    """

    versions: Mapping[str, str]
    gpus: tuple[str, ...]
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """Lead of a node's clock over the driver's, and the largest error of that estimate, in seconds."""

    ahead_s: float
    error_s: float


def local_versions() -> dict[str, str]:
    """Return the versions of python and PACKAGES on this machine, without importing the packages."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def version_fault(own: Mapping[str, str], name: str, theirs: Mapping[str, str]) -> Fault | None:
    """Return a fault that lists versions in which node ``name`` differs from the driver, or None."""
    unequal = [what for what in own if theirs.get(what) != own[what]]
    if not unequal:
        return None
    return Fault(
        fact=f"node {name} has {', '.join(f'{what} {theirs.get(what)}' for what in unequal)}",
        rule=f"the driver has {', '.join(f'{what} {own[what]}' for what in unequal)}, and all must "
        "run the same",
        remedy="install the driver's versions on the node; constraints.txt pins a tested set",
    )


def node_facts() -> NodeFacts:
    """Return versions and GPUs of the node on which it runs."""
    rows = _nvidia_smi("name,memory.total,driver_version")
    return NodeFacts(
        versions=local_versions(),
        gpus=tuple(f"{name} {memory}" for name, memory, _ in rows),
        driver=rows[0][2] if rows else "",
    )


def clock_s() -> float:
    """Return the node's clock in seconds since the Unix epoch; runs on the node."""
    return datetime.now(UTC).timestamp()


def time_store(uri: str, key: str, num_bytes: int) -> tuple[float, float]:
    """Return the seconds to write and to read an object, which stays in the store; runs on the node."""
    store, data = open_store(uri), bytes(num_bytes)
    begun_s = time.monotonic()
    store.put(key, [data], overwrite=True)
    written_s = time.monotonic()
    if store.get(key) != data:
        raise ValueError(f"{uri}/{key} came back with other bytes")
    return written_s - begun_s, time.monotonic() - written_s


def sees_object(uri: str, key: str) -> bool:
    """Return whether an object that another node wrote is visible; runs on the node."""
    try:
        return open_store(uri).size(key) > 0
    except KeyError:
        return False


def on_nodes(
    node_ids: Sequence[str], function: Callable[..., Any], *args: object, timeout_s: float
) -> dict[str, Any]:  # the function's own results, or the exception in their place
    """Run ``function`` once on each node; return its results by node, exceptions included.

    All nodes share the timeout; a node that does not answer in time has a TimeoutError.
    """
    task = ray.remote(function)
    # no CPU is requested, so that a busy node answers too
    refs = {
        node: task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(*args)
        for node in node_ids
    }
    deadline_s = time.monotonic() + timeout_s
    return {node: _result(ref, deadline_s - time.monotonic()) for node, ref in refs.items()}


def measure_skew(node_id: str, *, timeout_s: float) -> Skew | Exception:
    """Return the skew of a node's clock from the round with the shortest round trip, or the error.

    As in NTP, the node's clock is taken to be read halfway through the round trip.
    """
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        sent_s = clock_s()
        answer = on_nodes([node_id], clock_s, timeout_s=timeout_s)[node_id]
        if isinstance(answer, Exception):
            return answer
        received_s = clock_s()
        half_s = (received_s - sent_s) / 2
        rounds.append(Skew(ahead_s=answer - sent_s - half_s, error_s=half_s))
    return min(rounds, key=lambda skew: skew.error_s)


def _result(ref: ray.ObjectRef[Any], timeout_s: float) -> object:
    try:
        return ray.get(ref, timeout=max(timeout_s, 0.0))
    except GetTimeoutError:
        return TimeoutError("no answer in time")
    except RayError as error:
        # a RayTaskError wraps the exception that the task raised
        cause = getattr(error, "cause", None) or error
        return cause if isinstance(cause, Exception) else error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _nvidia_smi(columns: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
