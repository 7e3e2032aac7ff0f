"""Looks at every node of a connected cluster by small Ray tasks: versions, GPUs, clock, store.

It reports what it sees. What is wrong with it, doctor says.
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
    """What one node says of itself.

    Attributes:
        versions: Of python and of PACKAGES; ``none`` where it is missing.
        gpus: Name and memory of each GPU that the driver shows.
        driver: Version of the GPU driver; empty without one.
    """

    versions: Mapping[str, str]
    gpus: tuple[str, ...]
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """How far a node's clock is ahead of the driver's, and how far that may be wrong."""

    ahead_s: float
    error_s: float


def local_versions() -> dict[str, str]:
    """Versions in this process; packages are not imported for it."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def version_fault(own: Mapping[str, str], name: str, theirs: Mapping[str, str]) -> Fault | None:
    """Where node ``name`` differs from the driver; None when it does not."""
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
    """Runs on the node."""
    rows = _nvidia_smi("name,memory.total,driver_version")
    return NodeFacts(
        versions=local_versions(),
        gpus=tuple(f"{name} {memory}" for name, memory, _ in rows),
        driver=rows[0][2] if rows else "",
    )


def clock_s() -> float:
    """Runs on the node: seconds since the epoch."""
    return datetime.now(UTC).timestamp()


def time_store(uri: str, key: str, num_bytes: int) -> tuple[float, float]:
    """Runs on the node: seconds to write and to read an object, which stays."""
    store, data = open_store(uri), bytes(num_bytes)
    begun_s = time.monotonic()
    store.put(key, [data], overwrite=True)
    written_s = time.monotonic()
    if store.get(key) != data:
        raise ValueError(f"{uri}/{key} came back with other bytes")
    return written_s - begun_s, time.monotonic() - written_s


def sees_object(uri: str, key: str) -> bool:
    """Runs on the node: whether an object that another node wrote is there."""
    try:
        return open_store(uri).size(key) > 0
    except KeyError:
        return False


def on_nodes(
    node_ids: Sequence[str], function: Callable[..., Any], *args: object, timeout_s: float
) -> dict[str, Any]:  # the function's own results, or the exception in their place
    """Run ``function`` once on each node; by node, its result or the error that it ended with."""
    task = ray.remote(function)
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
    """The best of some rounds: the one with the shortest way there and back."""
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
