"""List the layouts that a search considers: every option of every field that the user leaves open.

The list has legal and illegal layouts. ``raymega.planner.search.search`` picks the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, isqrt
from typing import Any, get_args

from raymega.config.schema import Job, ParallelSection, ScheduleSection
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import ON_GRID
from raymega.plan.validation.unused_fields import settled
from raymega.planner.cost.context_cost import context_degrees, context_methods
from raymega.schedule.table import SCHEDULES

MICRO_BATCH_SIZE = "schedule.micro_batch_size"
MICRO_BATCH_SIZES = (1, 2, 4, 8)
MOST_CHUNKS = 8
ORDERS = ("1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "gpipe")
"""Names of schedules; of equally fast ones the first is chosen. ``interleaved`` is left out because
it is 1f1b with chunks, ``zb_auto`` because its own search is long and starts from zb_h1 or zb_h2.
"""
RECOMPUTES = ("none", "selective", "full")
SHARDINGS = get_args(ParallelSection.model_fields["sharding"].annotation)
CHOSEN = (
    "parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp", "parallel.ep", "parallel.etp",
    "parallel.cp_method", "parallel.sharding", "parallel.sequence_parallel", "parallel.stages",
    "schedule.name", "schedule.chunks", MICRO_BATCH_SIZE, "memory.recompute",
)  # fmt: skip
"""Fields that a search sets unless the user fixes them."""
_FOLLOWING: dict[str, dict[str, Any]] = {
    "parallel": {
        "first_stage_layers": "even", "last_stage_layers": "even",
        "is_embedding_a_layer": False, "is_loss_a_layer": False, "data_parallel_shard_degree": "all",
    },
    "schedule": {"microbatch_group_size_per_vp_stage": "pp", "max_in_flight_microbatches": "pp", "wgrad_activation_fraction": 1.0},
    "memory": {"recompute_parts": ("attention",)},
    "cluster": ON_GRID,
}  # fmt: skip
"""Values of fields that have a meaning only together with fields that the search sets."""
VARIED = (*CHOSEN, *(f"{name}.{field}" for name, fields in _FOLLOWING.items() for field in fields))
"""Fields in which the layouts of a search differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Space of the layouts that a search may try.

    Attributes:
        job: Job of which every layout is a variant.
        device: Accelerator of every rank.
        num_devices: Number of ranks in every layout.
        fixed: Dotted paths of the fields that keep the job's values.
    """

    job: Job
    device: Accelerator
    num_devices: int
    fixed: frozenset[str] = frozenset()

    def options(self, path: str, values: Any) -> tuple[Any, ...]:
        """Return ``values``, or only the job's own value when the field at ``path`` is fixed."""
        return (self.mine(path),) if path in self._held else tuple(values)

    @property
    def _held(self) -> frozenset[str]:
        """Fixed fields, with the micro-batch size where another one would change the run's result."""
        is_held = depends_on_micro_batch_size(self.job)
        return self.fixed | {MICRO_BATCH_SIZE} if is_held else self.fixed

    def mine(self, path: str) -> Any:
        """Return the job's own value of the field at ``path``."""
        section, field = path.split(".")
        return getattr(getattr(self.job, section), field)


def candidates(space: Space) -> Iterator[Job]:
    """Yield every layout that is worth evaluating, legal or not."""
    base = space.job.with_values(
        # layouts that share the state out have no replica to continue with, and cost as much without
        elastic={"on_replica_loss": "restart"},
        **{name: _free(space, name) for name in _FOLLOWING},
    )
    for degrees in _degrees(space):
        for experts in _expert_degrees(space, degrees):
            yield from _with_options(space, base, {**degrees, **experts})


def _free(space: Space, section: str) -> dict[str, Any]:
    following = _FOLLOWING[section].items()
    return {k: v for k, v in following if f"{section}.{k}" not in space.fixed}


def _degrees(space: Space) -> Iterator[dict[str, Any]]:
    """Yield dense degrees whose product is the number of devices."""
    job, num_devices = space.job, space.num_devices
    # Tensor-parallel groups stay inside a node and share whole heads.
    whole = divisors(gcd(space.device.devices_per_node, job.model.num_heads))
    for tp in space.options("parallel.tp", whole):
        deep = [p for p in divisors(num_devices // tp) if p <= job.model.num_layers]
        for pp in space.options("parallel.pp", deep):
            ranks = num_devices // tp // pp
            for cp in space.options("parallel.cp", context_degrees(job, ranks)):
                dp = ranks // cp
                is_whole = tp * pp * cp * dp == num_devices
                is_free = "parallel.dp" not in space.fixed or dp == job.parallel.dp
                if is_whole and is_free and dp <= job.data.global_batch_size:
                    for way in space.options("parallel.cp_method", context_methods(job, cp)):
                        yield {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "cp_method": way}


def _expert_degrees(space: Space, degrees: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yield expert degrees that factorise the same ranks; one pair for a dense model."""
    num_experts = space.job.model.moe.num_experts
    ranks, tp = degrees["tp"] * degrees["cp"] * degrees["dp"], degrees["tp"]
    widths = dict.fromkeys((1, tp)) if num_experts else (1,)
    for etp in space.options("parallel.etp", widths):
        parts = divisors(num_experts) if num_experts else [1]
        for ep in space.options("parallel.ep", parts):
            if ranks % (ep * etp) == 0:
                yield {"ep": ep, "etp": etp}


def _with_options(space: Space, base: Job, degrees: dict[str, Any]) -> Iterator[Job]:
    """Yield the layouts of one set of degrees, with every option of the other fields.

    Sections that many layouts share are constructed once.
    """
    is_cuttable = degrees["tp"] > 1 and base.data.seq_len // degrees["cp"] % degrees["tp"] == 0
    schedules = list(_schedules(space, base, degrees))
    cut_streams = space.options("parallel.sequence_parallel", (is_cuttable,))
    for recompute, is_cut in product(space.options("memory.recompute", RECOMPUTES), cut_streams):
        cut = {**degrees, "sequence_parallel": is_cut}
        job = settled(base.with_values(parallel=cut, memory={"recompute": recompute}))
        for sharding in _shardings(space, degrees):
            # Layers are split by cost where there is a pipeline.
            parts = [
                job.parallel.model_copy(update={**sharding, "stages": stages})
                for kind in ("even", "auto")
                for stages in space.options("parallel.stages", (kind,))
            ]
            for schedule in schedules:
                parallel = parts[degrees["pp"] * schedule.chunks > 1]
                yield job.model_copy(update={"parallel": parallel, "schedule": schedule})


def _schedules(space: Space, base: Job, degrees: dict[str, Any]) -> Iterator[ScheduleSection]:
    """Yield schedule sections with every micro-batch size, number of chunks and order."""
    pp = degrees["pp"]
    sequences = -(-base.data.global_batch_size // degrees["dp"])
    names = ORDERS if pp > 1 else ORDERS[:1]
    most_chunks = min(MOST_CHUNKS, base.model.num_layers // pp) if pp > 1 else 1
    axes = (
        space.options(MICRO_BATCH_SIZE, [b for b in MICRO_BATCH_SIZES if b <= sequences]),
        space.options("schedule.chunks", range(1, max(1, most_chunks) + 1)),
        space.options("schedule.name", names),
    )
    is_named = "schedule.name" in space.fixed
    for size, v, name in product(*axes):
        if is_named or _is_worth_asking(name, v):
            chosen = {"micro_batch_size": size, "chunks": v, "name": name}
            yield base.schedule.model_copy(update=chosen)


def _is_worth_asking(name: str, chunks: int) -> bool:
    """Return whether a search should consider schedule ``name`` with ``chunks`` chunks.

    GPipe with chunks is left out: 1F1B runs the same order as fast and keeps fewer activations.
    """
    kind = SCHEDULES[name]
    return kind.least_chunks <= chunks <= kind.most_chunks and (name != "gpipe" or chunks == 1)


def _shardings(space: Space, degrees: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield levels of sharding, over all replicas or over the replicas of one node.

    Sharding inside a node (hybrid) needs several nodes with several replicas each.
    """
    inside = space.device.devices_per_node // degrees["tp"]
    replicas = degrees["dp"] * degrees["cp"]
    for level in space.options("parallel.sharding", SHARDINGS if replicas > 1 else ("none",)):
        is_hybrid = level != "none" and 1 < inside < replicas and replicas % inside == 0
        groups = ("all", inside) if is_hybrid else ("all",)
        for group in space.options("parallel.data_parallel_shard_degree", groups):
            yield {"sharding": level, "data_parallel_shard_degree": group}


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
