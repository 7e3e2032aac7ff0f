"""Checks of `raymega doctor` on the cluster that a job would use: facts, and remedies for problems.

``cluster/node_probes.py`` has the probes. No run is started and no object stays in the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal
from uuid import uuid4

import ray

from raymega.config.schema import ClusterSection
from raymega.errors import CapacityError, counted, one_line
from raymega.messages import Entered
from raymega.orchestrate.cluster.node_inventory import list_nodes
from raymega.orchestrate.cluster.node_probes import (
    NodeFacts,
    Skew,
    local_versions,
    measure_skew,
    node_facts,
    on_nodes,
    sees_object,
    time_store,
    version_fault,
)
from raymega.orchestrate.core.rank_placement import WorkerLocation, block_size, place_ranks
from raymega.orchestrate.diagnostics.measurement import measure
from raymega.orchestrate.workers.single_run import MAX_CAUSE_LENGTH
from raymega.plan.hardware.lookup import nvlink_bytes_per_s
from raymega.plan.run_plan import RunPlan
from raymega.storage.registry import open_store

Status = Literal["ok", "problem", "skipped"]
BANDWIDTH_ENTRY = "raymega.train.diagnostics.bandwidth"
NODE_TIMEOUT_S = 60.0
STORE_BYTES = 8 * 2**20
MAX_SKEW_S = 1.0
SLOW_SHARE = 0.5
"""Share of its axis' median bandwidth below which a group counts as slow."""
PROBE_PREFIX = "raymega-doctor"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFinding:
    """A finding of a check.

    Attributes:
        check: Name of the check.
        status: Result; ``skipped`` when the check was not possible, for the reason in ``fact``.
        fact: Description of what was found.
        remedy: Advice for a problem; empty otherwise.
        values: Numbers of the finding, for programs.
    """

    check: str
    status: Status
    fact: str
    remedy: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)  # plain JSON, differs by check


def examine(plan: RunPlan | None, *, store_uri: str = "") -> Iterator[CheckFinding]:
    """Run all checks on the connected cluster, and yield each finding as soon as it is made.

    Args:
        plan: Plan of the job to check for; without one, checks that need a job are skipped.
        store_uri: Root of the job's store.
    """
    nodes = {node.node_id: node.address for node in list_nodes(ClusterSection())}
    ids = list(nodes)
    yield from check_resources(plan)
    facts = on_nodes(ids, node_facts, timeout_s=NODE_TIMEOUT_S)
    yield from check_versions(local_versions(), facts, nodes)
    yield from check_gpus(facts, nodes)
    skews = {node: measure_skew(node, timeout_s=NODE_TIMEOUT_S) for node in ids}
    yield from check_clocks(skews, nodes)
    if plan is None:  # the other checks need a job
        yield CheckFinding(check="store", status="skipped", fact="no job file was given")
        yield CheckFinding(check="bandwidth", status="skipped", fact="no job file was given")
        return
    yield from check_store(ids, nodes, store_uri)
    yield from check_bandwidth(plan, gpus=_gpu_names(facts))


def check_resources(plan: RunPlan | None) -> Iterator[CheckFinding]:
    """Check that the grid fits on the cluster's nodes; yield the nodes, CPUs and GPUs."""
    cluster = plan.job.cluster if plan else ClusterSection()
    nodes = list_nodes(cluster)
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus, gpus = total.get("CPU", 0.0), total.get("GPU", 0.0)
    values = {"nodes": len(nodes), "cpus": cpus, "gpus": gpus}
    fact = f"{counted(len(nodes), 'node')} with {cpus:g} CPUs and {gpus:g} GPUs"
    if plan is not None:
        try:
            place_ranks(nodes, plan.grid, block=block_size(plan.grid, plan.job.parallel))
        except CapacityError as error:
            yield _problem("resources", values, **asdict(error.faults[0]))
            return
        fact += f"; grid {plan.grid.describe()} fits"
    yield CheckFinding(check="resources", status="ok", fact=fact, values=values)


def check_versions(
    own: Mapping[str, str], facts: Mapping[str, NodeFacts | Exception], names: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Check that driver and nodes run the same versions of python, ray, torch and raymega."""
    is_clean = True
    for node, found in facts.items():
        if isinstance(found, Exception):
            is_clean = False
            yield _problem(
                "versions",
                fact=f"node {names[node]} did not answer: {one_line(found, MAX_CAUSE_LENGTH)}",
                rule=f"a task that imports raymega must run on it within {NODE_TIMEOUT_S:g} s",
                remedy="install raymega on the node, or submit with a working folder that holds it",
            )
        elif fault := version_fault(own, names[node], found.versions):
            is_clean = False
            yield _problem("versions", **asdict(fault))
    if is_clean:
        fact = ", ".join(f"{name} {number}" for name, number in own.items())
        yield CheckFinding(check="versions", status="ok", fact=f"{fact} everywhere", values=own)


def check_gpus(
    facts: Mapping[str, NodeFacts | Exception], names: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Check that GPUs have one model and one driver version, and each node as many as Ray was told."""
    known = {node: found for node, found in facts.items() if isinstance(found, NodeFacts)}
    told = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes()}  # type: ignore[no-untyped-call]
    lacking = {n: found for n, found in known.items() if told.get(n, 0) > len(found.gpus)}
    for node, found in lacking.items():
        yield _problem(
            "gpus",
            fact=f"node {names[node]}: nvidia-smi shows {counted(len(found.gpus), 'GPU')}",
            rule=f"Ray offers {told[node]} there",
            remedy="look at dmesg for a fallen GPU (Xid), correct --num-gpus, or replace the node",
        )
    kinds = {gpu for found in known.values() for gpu in found.gpus}
    drivers = {found.driver for found in known.values() if found.driver}
    are_mixed = len(kinds) > 1 or len(drivers) > 1
    if are_mixed:
        yield _problem(
            "gpus",
            fact=f"GPUs are {', '.join(sorted(kinds))}, drivers {', '.join(sorted(drivers))}",
            rule="a step is as slow as its slowest GPU, and NCCL wants one driver everywhere",
            remedy="use one node type and one image",
        )
    if lacking or are_mixed:
        return
    if kinds:
        number = sum(len(found.gpus) for found in known.values())
        fact = f"{number} x {', '.join(kinds)}, driver {', '.join(drivers)}"
        yield CheckFinding(check="gpus", status="ok", fact=fact, values={"gpus": number})
    else:
        yield CheckFinding(check="gpus", status="skipped", fact="no node has a GPU")


def check_clocks(
    skews: Mapping[str, Skew | Exception], names: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Check that the nodes' clocks are within MAX_SKEW_S of the driver's; S3 signatures need it."""
    known = {node: skew for node, skew in skews.items() if isinstance(skew, Skew)}
    far = {n: s for n, s in known.items() if abs(s.ahead_s) - s.error_s > MAX_SKEW_S}
    for node, skew in far.items():
        yield _problem(
            "clocks",
            {"ahead_s": skew.ahead_s},
            fact=f"the clock of node {names[node]} is {skew.ahead_s:+.1f} s off "
            f"(+-{skew.error_s:.1f})",
            rule=f"at most {MAX_SKEW_S:g} s, or logs do not line up and stores refuse signatures",
            remedy="run chrony or systemd-timesyncd on the node",
        )
    if not far and known:
        largest = max(abs(skew.ahead_s) for skew in known.values())
        fact = f"clocks differ by at most {largest:.3f} s"
        yield CheckFinding(check="clocks", status="ok", fact=fact, values={"largest_s": largest})


def check_store(ids: Sequence[str], names: Mapping[str, str], uri: str) -> Iterator[CheckFinding]:
    """Check that every node can write and read the store, and sees what another node wrote."""
    key = f"{PROBE_PREFIX}/{uuid4().hex}"
    keys = {node: f"{key}-{index}" for index, node in enumerate(ids)}
    try:
        for node in ids:  # one after the other, so that they do not share the store's bandwidth
            found = on_nodes(
                [node], time_store, uri, keys[node], STORE_BYTES, timeout_s=NODE_TIMEOUT_S
            )[node]
            yield _store_finding(names[node], uri, found)
        for node, seen in on_nodes(
            ids, sees_object, uri, keys[ids[0]], timeout_s=NODE_TIMEOUT_S
        ).items():
            if seen is False:
                yield _problem(
                    "store",
                    fact=f"node {names[node]} does not see what node {names[ids[0]]} wrote to {uri}",
                    rule="all nodes must share the run's store",
                    remedy="use an object store, or mount the same file system on every node",
                )
    finally:
        on_nodes(ids, _delete, uri, list(keys.values()), timeout_s=NODE_TIMEOUT_S)


def check_bandwidth(
    plan: RunPlan, *, gpus: Mapping[str, str] | None = None
) -> Iterator[CheckFinding]:
    """Time an all-reduce on every group of every axis, one axis at a time.

    Args:
        plan: Plan of the run whose groups are measured.
        gpus: Name of the GPUs by node id, of nodes that have some.
    """
    if plan.grid.world_size == 1:
        yield CheckFinding(check="bandwidth", status="skipped", fact="one rank sends nothing")
        return
    try:
        timings, homes, fault = measure(plan, BANDWIDTH_ENTRY)
    except CapacityError as error:
        timings, homes, fault = [], {}, error.faults[0]
    if fault is not None:
        yield _problem("bandwidth", **asdict(fault))
    yield from judge_bandwidth(timings, links=_links(homes, gpus or {}))


def judge_bandwidth(
    timings: Sequence[Entered], *, links: Mapping[int, tuple[str, float]] | None = None
) -> Iterator[CheckFinding]:
    """Yield a finding for each axis, and a problem for each group that is slower than others of its axis.

    Args:
        timings: Reports of all ranks, with axis, message size and seconds.
        links: Node of each rank, and NVLink bandwidth of its GPU in bytes/s, by rank.
    """
    for axis in dict.fromkeys(timing.phase for timing in timings):
        speeds: dict[str, float] = {}
        size = "0"
        for timing in (each for each in timings if each.phase == axis):
            size, _, ranks = timing.detail.partition(":")
            number = ranks.count(",") + 1
            # bus bandwidth, as in nccl-tests
            speed = int(size) / timing.seconds * 2 * (number - 1) / number
            speeds[ranks] = min(speed, speeds.get(ranks, speed))
        middle, slowest = median(speeds.values()), min(speeds.values())
        name = axis.removesuffix("_forward")
        values = {
            "axis": name,
            "groups": len(speeds),
            "message_bytes": int(size),
            "bytes_per_s": middle,
            "slowest_bytes_per_s": slowest,
            "link_bytes_per_s": _common_link(speeds, links or {}),
        }
        fact = (
            f"{name}: {middle / 1e9:.3f} GB/s of bus bandwidth, slowest group {slowest / 1e9:.3f}"
        )
        yield CheckFinding(check="bandwidth", status="ok", fact=fact, values=values)
        for ranks, speed in speeds.items():
            if speed < SLOW_SHARE * middle:
                yield _problem(
                    "bandwidth",
                    values,
                    fact=f"{name} group of ranks {ranks} moves {speed / 1e9:.3f} GB/s",
                    rule=f"the median of its axis is {middle / 1e9:.3f} GB/s",
                    remedy="look for a node on another switch, a network card that is down, or a "
                    "busy node",
                )


def _gpu_names(facts: Mapping[str, NodeFacts | Exception]) -> dict[str, str]:
    known = {node: found for node, found in facts.items() if isinstance(found, NodeFacts)}
    return {node: found.gpus[0] for node, found in known.items() if found.gpus}


def _links(
    homes: Mapping[int, WorkerLocation], gpus: Mapping[str, str]
) -> dict[int, tuple[str, float]]:
    """Return each rank's node and NVLink bandwidth in bytes/s; ranks without a known one are left out."""
    speeds = {node: nvlink_bytes_per_s(name) for node, name in gpus.items()}
    nodes = {rank: location.node_id for rank, location in homes.items() if location.gpus}
    return {rank: (node, speed) for rank, node in nodes.items() if (speed := speeds.get(node))}


def _common_link(groups: Iterable[str], links: Mapping[int, tuple[str, float]]) -> float:
    """Return the bandwidth of an axis whose groups are all inside a node, in bytes/s; 0 if unknown."""
    found: set[float] = set()
    for group in groups:
        ends = {links.get(int(rank), ("", 0.0)) for rank in group.split(",")}
        found |= {speed for _, speed in ends} if len(ends) == 1 else {0.0}
    return min(found, default=0.0)


def _delete(uri: str, keys: Sequence[str]) -> None:
    store = open_store(uri)
    for key in keys:
        store.delete(key)


def _store_finding(name: str, uri: str, found: tuple[float, float] | Exception) -> CheckFinding:
    if isinstance(found, Exception):
        return _problem(
            "store",
            fact=f"node {name}: {uri}: {one_line(found, MAX_CAUSE_LENGTH)}",
            rule="every node must be able to write and read the run's store",
            remedy="correct checkpoint.uri, permissions or the node's role",
        )
    write, read = (STORE_BYTES / max(seconds, 1e-9) for seconds in found)
    fact = f"node {name} writes {write / 1e6:.0f} MB/s and reads {read / 1e6:.0f} MB/s at {uri}"
    values = {"node": name, "write_bytes_per_s": write, "read_bytes_per_s": read}
    return CheckFinding(check="store", status="ok", fact=fact, values=values)


def _problem(
    check: str,
    values: Mapping[str, Any] | None = None,
    *,
    fact: str,
    rule: str,
    remedy: str,
) -> CheckFinding:
    fact = f"{fact}; {rule}"
    return CheckFinding(
        check=check, status="problem", fact=fact, remedy=remedy, values=values or {}
    )
