"""Seconds that a transfer takes: a collective on a group of devices, a message between two.

Closed forms of rings with latency and bandwidth; which links a group crosses follows from how many
of its ranks share a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from raymega.plan.hardware.catalog import Accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """A group of ranks as the network sees it.

    Attributes:
        size: Ranks.
        per_node: How many of them share a node; 1 is none.
    """

    size: int
    per_node: int

    @property
    def is_inside(self) -> bool:
        """All on one node."""
        return self.per_node >= self.size


def make_span(device: Accelerator, *, size: int, stride: int) -> GroupSpan:
    """Of ``size`` ranks that lie ``stride`` apart, as an axis of a grid does."""
    per_node = max(1, min(size, device.devices_per_node // stride))
    return GroupSpan(size=size, per_node=per_node)


def gather_s(device: Accelerator, span: GroupSpan, num_bytes: float) -> float:
    """An all-gather that leaves ``num_bytes`` on every rank, or a reduce-scatter of as many.

    A ring moves (n - 1) / n of them through every rank. It crosses the edge of a node once, whatever
    number of its ranks are there, and each of these brings its own share of the network.
    """
    if span.size == 1:
        return 0.0
    latency = device.fitted.link_latency_s if span.is_inside else device.fitted.network_latency_s
    share = (span.size - 1) / span.size
    return share * num_bytes / _ring_bytes_per_s(device, span) + latency * _steps(device, span)


def _steps(device: Accelerator, span: GroupSpan) -> float:
    """Latencies of a collective: gloo's rings, between CPU workers, pay for every step around; NCCL's
    protocols for as many as a tree has."""
    return span.size - 1 if device.shared_cores else log2(span.size)


def all_reduce_s(device: Accelerator, span: GroupSpan, num_bytes: float) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * gather_s(device, span, num_bytes)


def ring_steps_s(device: Accelerator, span: GroupSpan) -> float:
    """What a ring's steps take beside their bytes: n - 1 for each of many small gathers or sums."""
    latency = device.fitted.link_latency_s if span.is_inside else device.fitted.network_latency_s
    return (span.size - 1) * latency


def exchange_s(device: Accelerator, span: GroupSpan, num_bytes: float) -> float:
    """An all-to-all in which every rank has ``num_bytes``, an even part for each rank, its own too.

    What stays in the node and what leaves it travel side by side; every rank has its own share of
    the network.
    """
    if span.size == 1:
        return 0.0
    fitted = device.fitted
    part = num_bytes / span.size
    inside = part * (span.per_node - 1) / device.reached_link_bytes_per_s
    if span.is_inside:
        return inside + fitted.link_latency_s * log2(span.size)
    outside = part * (span.size - span.per_node) / device.reached_network_bytes_per_s
    return max(inside, outside) + fitted.network_latency_s * log2(span.size)


def message_s(device: Accelerator, num_bytes: float, *, is_inside: bool) -> float:
    """From one device to another, of the same node or not."""
    fitted = device.fitted
    if is_inside:
        return num_bytes / device.reached_link_bytes_per_s + fitted.link_latency_s
    return num_bytes / device.reached_network_bytes_per_s + fitted.network_latency_s


def _ring_bytes_per_s(device: Accelerator, span: GroupSpan) -> float:
    inside = device.reached_link_bytes_per_s
    if span.is_inside:
        return inside
    return min(inside, device.reached_network_bytes_per_s * span.per_node)
