"""Rates of the roofline: fixed figures of an H100 SXM, so that only the code can move the result."""

from __future__ import annotations

PEAK_FLOPS = 989e12
"""Dense peak in 16 bits, of NVIDIA's data sheet."""
PRODUCT_FLOPS, CUT_PRODUCT_FLOPS = 700e12, 600e12
"""Products a second of 16 bits, and with the narrow matrices of tp=8."""
WIDE_PRODUCT_FLOPS = 50e12
"""Products of float32 without TF32, such as a router's."""
ATTENTION_FLOPS = {"attention forward": 550e12, "attention backward": 450e12}
"""FLOPs a second of the newest attention kernel."""
MEMORY_BYTES_PER_S = 2.2e12
"""Bytes a second of element-wise kernels."""
LINK_BYTES_PER_S, NETWORK_BYTES_PER_S = 370e9, 45e9
"""Bytes a second of one GPU in one direction: NVLink inside a node, InfiniBand between nodes."""
HOST_BYTES_PER_S = 50e9
"""Bytes a second of copies from or to pinned memory."""
LAUNCH_S = 4e-6
"""Seconds of the host for one launch."""


def operation_s(kind: str, num_bytes: float, flops: float, *, tp: int) -> float:
    """Return the seconds of an operation on the device; memory bounds products from below.

    Args:
        kind: Kind of operation in its cost note.
        num_bytes: Bytes that it reads and writes.
        flops: FLOPs of a product or of attention.
        tp: Tensor-parallel degree of the job.
    """
    if kind in ATTENTION_FLOPS:
        return flops / ATTENTION_FLOPS[kind]
    rate = WIDE_PRODUCT_FLOPS
    if kind == "product":
        rate = CUT_PRODUCT_FLOPS if tp >= 8 else PRODUCT_FLOPS
    return max(flops / rate, num_bytes / MEMORY_BYTES_PER_S)


def collective_s(what: str, num_bytes: float, *, ranks: int, per_node: int) -> float:
    """Return the seconds of a collective or a message.

    A ring sends (n - 1) / n of the bytes through each rank, an all-reduce twice. Each rank of a node
    brings its own share of the network. In an exchange, what stays in the node and what leaves it go at
    the same time.

    Args:
        what: NCCL's operation.
        num_bytes: Bytes of the larger buffer, sent or received.
        ranks: Number of ranks in the group.
        per_node: Number of them on one node.
    """
    is_inside = per_node >= ranks
    if what == "exchange":
        inside = num_bytes * (per_node - 1) / ranks / LINK_BYTES_PER_S
        return max(inside, num_bytes * (ranks - per_node) / ranks / NETWORK_BYTES_PER_S)
    if what in ("send", "recv"):
        return num_bytes / (LINK_BYTES_PER_S if is_inside else NETWORK_BYTES_PER_S)
    ring = LINK_BYTES_PER_S if is_inside else min(LINK_BYTES_PER_S, per_node * NETWORK_BYTES_PER_S)
    passes = 2 if what == "all_reduce" else 1
    return passes * num_bytes * (ranks - 1) / ranks / ring
