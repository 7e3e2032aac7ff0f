"""What each way of context parallelism costs a rank in one layer and micro-batch: pure formulas.

FLOPs of its blocks, bytes that it sends to neighbours and around, memory beyond what is kept. Which
way is the best for packs of documents is dynamic_cp's; rates of hardware are catalog's.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import Job
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import ActivationShape, activation_shape
from raymega.plan.validation.context_parallel import exchange_faults

METHODS = ("ring", "all_gather", "all_to_all", "hybrid")
FORWARD_AND_BACKWARD = 3.5
"""Forward multiplies twice a block; fused backward makes the scores again and multiplies five times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCost:
    """Of one rank, one layer and one micro-batch, forward and backward together.

    Attributes:
        method: Which way.
        inner_share: Of the group's ranks those that exchange heads with each other.
        flops: Of causal attention; equal on all ranks.
        inner_bytes: Sent to neighbours to exchange heads; nothing can be done meanwhile.
        outer_bytes: Sent around, or to collect: keys, values and the gradients by them.
        hidden_share: Of the outer bytes those that travel behind work.
        added_bytes: Memory traffic of adding gradients that arrive to those that are here.
        passing_bytes: Memory for others' keys, values and gradients while the layer works.
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
        """Of the layer's attention, 16-bit rates.

        Args:
            device: What the ranks are.
            span: Global ranks between the first and the last one of a cp group, both included.
        """
        return self._work_s(device) + self.exposed_s(device, span=span)

    def exposed_s(self, device: Accelerator, *, span: int) -> float:
        """The part of :meth:`seconds` in which ranks wait for each other's bytes."""
        travel = self.outer_bytes / device.bytes_per_s(span)
        exchange = self.inner_bytes / device.bytes_per_s(span * self.inner_share)
        hidden = min(self._work_s(device), travel * self.hidden_share)
        return travel - hidden + exchange

    def _work_s(self, device: Accelerator) -> float:
        return self.flops / device.attention_flops


def context_costs(job: Job) -> tuple[ContextCost, ...]:
    """Every way that the job's heads allow at its ``parallel.cp``; empty when that is 1."""
    parallel, model = job.parallel, job.model
    heads = parallel.tp, model.num_heads, model.num_kv_heads
    return tuple(
        shape_cost(activation_shape(job), method)
        for method in METHODS
        if parallel.cp > 1
        and not exchange_faults(parallel.cp, method, parallel.hierarchical_cp_size, *heads)
    )


def shape_cost(shape: ActivationShape, method: str) -> ContextCost:
    """Of ``method`` for a micro-batch and a layer as ``shape`` has them; one document a row."""
    model, parallel = shape.model, shape.parallel
    cp = parallel.cp
    inner = {"all_to_all": cp, "hybrid": parallel.hierarchical_cp_size}.get(method, 1)
    outer = cp // inner
    element, wide, tokens = shape.element, shape.wide, shape.tokens
    heads, kv_heads = model.num_heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    # Where fewer key heads than ranks are exchanged, those that share one get a copy each.
    kv = 2 * tokens * max(kv_heads, inner) * model.head_width
    q = tokens * heads * model.head_width
    pairs = tokens * shape.seq_len / 2
    exchanged = 2 * (2 * q + kv) * element * (inner - 1) / inner  # q, k, v and output, and back
    hops = outer - 1
    is_gathered = method == "all_gather"
    # Gathered: by rank and in order, for keys and values as for gradients. Ring: what is here, and
    # what arrives.
    copies = 2 * (outer if is_gathered else min(hops, 1))
    return ContextCost(
        method=method,
        inner_share=inner / cp,
        flops=FORWARD_AND_BACKWARD * 2 * 2 * pairs * heads * model.head_width,
        inner_bytes=exchanged,
        outer_bytes=hops * kv * (2 * element + wide),
        # A gather goes behind the rank's own block alone; the reduction behind nothing.
        hidden_share=(2 * element / (2 * element + wide)) if is_gathered else 1.0,
        added_bytes=hops * kv * 3 * wide,
        passing_bytes=copies * kv * (element + wide),
    )
