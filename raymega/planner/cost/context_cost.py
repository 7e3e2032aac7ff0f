"""Choose the degrees and methods of context parallelism that a search tries, and compute the cost of each method.

The cost is FLOPs, bytes sent, and memory beyond what is kept for backward, for one rank, layer and micro-batch.
``raymega.plan.packing.dynamic_cp`` places packs of documents on ranks, and
``raymega.plan.hardware.catalog`` has the rates of hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raymega.config.schema import Job
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_shape import ActivationShape, activation_shape
from raymega.plan.validation.context_parallel import exchange_faults
from raymega.planner.kernels.kernel_time import memory_s

METHODS = ("ring", "all_gather", "all_to_all", "hybrid")
SEARCHED_METHODS = ("ring", "all_to_all")
LEAST_TOKENS = 4096
"""Least tokens of a sequence on each context-parallel rank; shorter parts cost more than they save."""
FORWARD_AND_BACKWARD = 3.5
"""FLOPs of both passes over those of the forward. The forward multiplies twice a block; the fused
backward recomputes the scores and multiplies five times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCost:
    """Cost of one method for one rank, layer and micro-batch, forward and backward together.

    Attributes:
        method: Name of the method, a value of ``parallel.cp_method``.
        inner_share: Share of the group's ranks that exchange heads with each other.
        flops: FLOPs of attention; equal on all ranks.
        inner_bytes: Bytes sent to neighbours to exchange heads; they overlap nothing.
        outer_bytes: Bytes sent around the ring, or gathered: keys, values and their gradients.
        hidden_share: Share of the outer bytes that overlap computation.
        added_bytes: Memory traffic of adding gradients that arrive to the local ones.
        passing_bytes: Memory for other ranks' keys, values and gradients while the layer runs.
    """

    method: str
    inner_share: float
    flops: float
    inner_bytes: float
    outer_bytes: float
    hidden_share: float
    added_bytes: float
    passing_bytes: float

    def seconds(self, device: Accelerator, *, span: int) -> float:
        """Return the seconds of the layer's attention at 16-bit rates.

        Args:
            device: Accelerator of every rank.
            span: Global ranks between the first and the last one of a cp group, both included.
        """
        return self._work_s(device) + self.exposed_s(device, span=span)

    def exposed_s(self, device: Accelerator, *, span: int) -> float:
        """Return the part of :meth:`seconds` in which ranks wait for each other's bytes."""
        travel = self.outer_bytes / device.bytes_per_s(span)
        exchange = self.inner_bytes / device.bytes_per_s(span * self.inner_share)
        hidden = min(self._work_s(device), travel * self.hidden_share)
        return travel - hidden + exchange

    def _work_s(self, device: Accelerator) -> float:
        return self.flops / device.attention_flops


def context_degrees(job: Job, ranks: int) -> Iterator[int]:
    """Yield powers of two that leave every rank a long part of a sequence."""
    cp = 1
    while ranks % cp == 0 and (cp == 1 or job.data.seq_len // cp >= LEAST_TOKENS):
        yield cp
        cp *= 2


def context_methods(job: Job, cp: int) -> tuple[str, ...]:
    """Return the methods to try with ``cp`` ranks, the job's own first."""
    return (
        tuple(dict.fromkeys((job.parallel.cp_method, *SEARCHED_METHODS))) if cp > 1 else ("ring",)
    )


def context_costs(job: Job) -> tuple[ContextCost, ...]:
    """Return the cost of every method that the job's heads allow; empty when ``parallel.cp`` is 1."""
    parallel, model = job.parallel, job.model
    heads = parallel.tp, model.num_heads, model.num_kv_heads
    return tuple(
        shape_cost(activation_shape(job), method)
        for method in METHODS
        if parallel.cp > 1
        and not exchange_faults(parallel.cp, method, parallel.hierarchical_cp_size, *heads)
    )


def shape_cost(shape: ActivationShape, method: str) -> ContextCost:
    """Return the cost of ``method`` for a micro-batch and a layer of ``shape``.

    A row has one document.
    """
    model, parallel = shape.model, shape.parallel
    cp = parallel.cp
    inner = inner_ranks(parallel, method)
    outer = cp // inner
    element, wide, tokens = shape.element, shape.wide, shape.tokens
    heads, kv_heads = model.num_heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    # With fewer key heads than exchanging ranks, ranks that share a head get a copy each.
    kv = 2 * tokens * max(kv_heads, inner) * model.head_width
    q = tokens * heads * model.head_width
    pairs = tokens * shape.seq_len / (2 if shape.family.is_causal else 1)
    exchanged = 2 * (2 * q + kv) * element * (inner - 1) / inner  # q, k, v and output, and back
    hops = outer - 1
    is_gathered = method == "all_gather"
    # Gathered: all places by rank and again in order. Ring: the part that is here, and the
    # one that arrives.
    copies = 2 * (outer if is_gathered else min(hops, 1))
    return ContextCost(
        method=method,
        inner_share=inner / cp,
        flops=FORWARD_AND_BACKWARD * 2 * 2 * pairs * heads * model.head_width,
        inner_bytes=exchanged,
        outer_bytes=hops * kv * (2 * element + wide),
        # A gather overlaps the rank's own block alone; the reduction overlaps nothing.
        hidden_share=(2 * element / (2 * element + wide)) if is_gathered else 1.0,
        added_bytes=hops * kv * 3 * wide,
        passing_bytes=copies * kv * (element + wide),
    )


def context_parallel_s(shape: ActivationShape, device: Accelerator) -> float:
    """Return the exposed seconds of traffic over cp in one pass.

    They include sums of gradients. Each pass takes half of the total.
    """
    parallel = shape.parallel
    if parallel.cp == 1:
        return 0.0
    cost = shape_cost(shape, parallel.cp_method)
    exposed = cost.exposed_s(device, span=parallel.tp * parallel.cp)
    return (exposed + memory_s(device, cost.added_bytes)) / 2
