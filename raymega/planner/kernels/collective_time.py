"""Estimate the seconds of a collective on a group of devices, or of a message between two devices.

Each estimate is a closed form of a ring with a latency and a bandwidth. The number of ranks that
share a node decides which links a group crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from raymega.plan.hardware.catalog import Accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """Size of a group of ranks, and how many of them share a node.

    Attributes:
        size: Number of ranks in the group.
        per_node: Number of the group's ranks on one node; 1 when each rank is on a node of its own.
    """

    size: int
    per_node: int

    @property
    def is_inside(self) -> bool:
        """Return whether all ranks of the group are on one node."""
        return self.per_node >= self.size


def make_span(device: Accelerator, *, size: int, stride: int) -> GroupSpan:
    """Return the span of ``size`` ranks that are ``stride`` apart, as those of a grid axis are."""
    per_node = max(1, min(size, device.devices_per_node // stride))
    return GroupSpan(size=size, per_node=per_node)


def gather_s(device: Accelerator, span: GroupSpan, num_bytes: float) -> float:
    """Return the seconds of an all-gather that leaves ``num_bytes`` on every rank.

    A reduce-scatter of ``num_bytes`` takes as long. A ring moves (n - 1) / n of the bytes through
    every rank. It crosses the edge of a node once, whatever the number of its ranks there. Each of
    these ranks adds its own share of the network.
    """
    if span.size == 1:
        return 0.0
    latency = device.fitted.link_latency_s if span.is_inside else device.fitted.network_latency_s
    share = (span.size - 1) / span.size
    return share * num_bytes / _ring_bytes_per_s(device, span) + latency * _steps(device, span)


def _steps(device: Accelerator, span: GroupSpan) -> float:
    """Return the number of latencies in a collective.

    The rings of gloo, between CPU workers, pay one latency for each of the n - 1 steps. The
    protocols of NCCL pay log2(n), the depth of a tree.
    """
    return span.size - 1 if device.shared_cores else log2(span.size)


def all_reduce_s(device: Accelerator, span: GroupSpan, num_bytes: float) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_s(device, span, num_bytes)


def ring_steps_s(device: Accelerator, span: GroupSpan) -> float:
    """Return the latency of the n - 1 steps of a ring, without the time of its bytes.

    It applies to each of many small gathers or reductions.
    """
    latency = device.fitted.link_latency_s if span.is_inside else device.fitted.network_latency_s
    return (span.size - 1) * latency


def exchange_s(
    device: Accelerator, span: GroupSpan, num_bytes: float, *, outside_share: float = 1.0
) -> float:
    """Return the seconds of an all-to-all with ``num_bytes`` on every rank.

    Each rank sends an even part to each rank, its own included. Traffic inside the node and traffic
    between nodes run concurrently. Every rank has its own share of the network. ``outside_share`` is
    the part of the bytes for other nodes that crosses the network, where copies are made there.
    """
    if span.size == 1:
        return 0.0
    fitted = device.fitted
    part = num_bytes / span.size
    inside = part * (span.per_node - 1) / device.reached_link_bytes_per_s
    if span.is_inside:
        return inside + fitted.link_latency_s * log2(span.size)
    outside = (
        outside_share * part * (span.size - span.per_node) / device.reached_network_bytes_per_s
    )
    return max(inside, outside) + fitted.network_latency_s * log2(span.size)


def message_s(device: Accelerator, num_bytes: float, *, is_inside: bool) -> float:
    """Return the seconds of a message from one device to another.

    ``is_inside`` says that both devices are on one node.
    """
    fitted = device.fitted
    if is_inside:
        return num_bytes / device.reached_link_bytes_per_s + fitted.link_latency_s
    return num_bytes / device.reached_network_bytes_per_s + fitted.network_latency_s


def _ring_bytes_per_s(device: Accelerator, span: GroupSpan) -> float:
    inside = device.reached_link_bytes_per_s
    if span.is_inside:
        return inside
    return min(inside, device.reached_network_bytes_per_s * span.per_node)
