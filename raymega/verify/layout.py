"""Layout: degrees and options with which a job runs, each with its path in the job and the values to try.

`legal_layouts.py` decides which layouts are legal for a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any, Literal, get_args

from raymega.config.schema import Job
from raymega.plan.grid import AXES
from raymega.plan.stages import KINDS, LAYER, even_counts
from raymega.schedule.table import MANY, SCHEDULES
from raymega.verify.tasks import GRIDS

Device = Literal["cpu", "cuda"]
DEGREES = ("tp", "cp", "pp", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SIMPLEST_SCHEDULE = "gpipe"
SIMPLEST_STAGES = "even"
FEW_RANKS = 2
"""Largest number of ranks with which a layout tries compiled kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Field of the job that may differ between layouts of one run.

    Attributes:
        name: Name of the field in Layout.
        path: Dotted path of the field in the job.
        values: Values that may be drawn, the simplest first.
        others: Function to further values, of a job and a layout with its degrees and chunks.
        matters: Function to whether the field has an effect on a layout; else the simplest is drawn.
        is_of: Function to whether a job's model has what the field is of; else nothing is drawn.
    """

    name: str = ""
    path: str
    values: tuple[Any, ...]
    others: Callable[[Job, Layout], tuple[Any, ...]]
    matters: Callable[[Layout], bool]
    is_of: Callable[[Job], bool]

    @property
    def simplest(self) -> Any:
        """Simplest value."""
        return self.values[0]


def _option(
    path: str,
    *values: Any,
    others: Callable[[Job, Layout], tuple[Any, ...]] = lambda _job, _layout: (),
    matters: Callable[[Layout], bool] = lambda _layout: True,
    is_of: Callable[[Job], bool] = lambda _job: True,
) -> Any:
    """Return a field of Layout that is an option; ``values`` only where the job's schema lists none."""
    allowed: Any = Job
    for name in path.split("."):  # a section, at times a part of it, the field
        allowed = allowed.model_fields[name].annotation
    values = values or ((False, True) if allowed is bool else get_args(allowed))
    option = Option(path=path, values=values, others=others, matters=matters, is_of=is_of)
    return field(default=option.simplest, metadata={"option": option})


def _expert_degrees(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return the degrees of expert parallelism that a layout may have."""
    if not job.model.moe.num_experts:
        return ()
    ranks = layout.stage_size
    return tuple(degree for degree in range(2, ranks + 1) if ranks % degree == 0)


def _stage_texts(job: Job, layout: Layout) -> tuple[str, ...]:
    """Return uneven placements: nearly all layers on the first stage, or none on an end or middle."""
    layers, stages = job.model.num_layers, layout.num_stages
    # at most one layer on each stage but the first
    others = [min(1, max(0, layers - stage)) for stage in range(1, stages)]
    counts = [
        [layers - sum(others), *others],
        [0, *even_counts(layers, stages - 1)],
        [*even_counts(layers, stages - 1), 0],
    ]
    if stages > 2:
        counts.append([0, *even_counts(layers, stages - 2), 0])
        halves = even_counts(layers, stages - 1)
        counts.append([halves[0], 0, *halves[1:]])
    return tuple(f"E{'|'.join(LAYER * count for count in each)}L" for each in counts)


def _end_counts(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return layer counts of an end stage: none, one, and two more than an even split."""
    layers = job.model.num_layers
    return tuple(sorted({0, min(1, layers), min(layers, layers // layout.num_stages + 2)}))


def _ring_sizes(_job: Job, layout: Layout) -> tuple[int, ...]:
    """Return further numbers of neighbours that exchange heads."""
    return tuple(n for n in range(3, layout.cp) if layout.cp % n == 0)


def _schedule_option(name: str, *values: Any, others: Callable[[int], tuple[int, ...]]) -> Any:
    """Return an option that only some schedules read; ``others`` are further values, of pp."""

    def is_read(layout: Layout) -> bool:
        return layout.pp > 1 and layout.chunks >= SCHEDULES[layout.schedule].reads.get(name, MANY)

    return _option(
        f"schedule.{name}", *values, others=lambda _job, at: others(at.pp), matters=is_read
    )


def _has_replicas(layout: Layout) -> bool:
    return layout.dp * layout.cp > 1


def _cuts_experts(layout: Layout) -> bool:
    return layout.ep * layout.etp > 1


def _is_split_evenly(layout: Layout) -> bool:
    """Return whether there are several stages, and ``even`` distributes the layers."""
    return layout.num_stages > 1 and layout.stages == SIMPLEST_STAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of the axes, and all options that must not change a run's numbers."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    # pipeline: schedule and chunks, then the fields that only some schedules read
    schedule: str = _option(
        "schedule.name",
        *sorted(SCHEDULES, key=lambda name: (name != SIMPLEST_SCHEDULE, name)),
        matters=lambda at: at.pp > 1,
    )
    chunks: int = _option("schedule.chunks", 1, 2, 3)
    microbatch_group_size_per_vp_stage: int | str = _schedule_option(
        "microbatch_group_size_per_vp_stage", "pp", others=lambda pp: (pp + 1, 2 * pp)
    )
    max_in_flight_microbatches: int | str = _schedule_option(
        "max_in_flight_microbatches", "pp", others=lambda pp: (1, 2 * pp)
    )
    wgrad_activation_fraction: float = _schedule_option(
        "wgrad_activation_fraction", 1.0, 0.5, others=lambda _pp: ()
    )
    # placement of layers on stages
    stages: str = _option(
        "parallel.stages",
        SIMPLEST_STAGES,
        "auto",
        others=_stage_texts,
        matters=lambda at: at.num_stages > 1,
    )
    first_stage_layers: int | str = _option(
        "parallel.first_stage_layers", "even", others=_end_counts, matters=_is_split_evenly
    )
    last_stage_layers: int | str = _option(
        "parallel.last_stage_layers", "even", others=_end_counts, matters=_is_split_evenly
    )
    is_embedding_a_layer: bool = _option("parallel.is_embedding_a_layer", matters=_is_split_evenly)
    is_loss_a_layer: bool = _option("parallel.is_loss_a_layer", matters=_is_split_evenly)
    # rank order, and expert parallelism
    order: str = _option(
        "parallel.order",
        *sorted(map("-".join, permutations(AXES)), key=lambda order: order != DEFAULT_ORDER),
    )
    ep: int = _option(
        "parallel.ep", 1, others=_expert_degrees, matters=lambda at: at.stage_size > 1
    )
    etp: int = _option(
        "parallel.etp", 1, others=_expert_degrees, matters=lambda at: at.stage_size > 1
    )
    moe_token_dispatcher_type: str = _option(
        "parallel.moe_token_dispatcher_type", matters=_cuts_experts
    )
    overlap_moe_expert_parallel_comm: bool = _option(
        "parallel.overlap_moe_expert_parallel_comm", matters=_cuts_experts
    )
    # workers that evaluate tasks; before dynamic_cp, which needs them beside the run
    eval_tasks_on: str = _option("run.eval_tasks_on")
    eval_tasks_grid: str = _option(
        "run.eval_tasks_grid", *GRIDS, matters=lambda at: at.eval_tasks_on == "beside"
    )
    # sharding of state, sequence and context parallelism
    sharding: str = _option("parallel.sharding", matters=_has_replicas)
    data_parallel_shard_degree: int | str = _option(
        "parallel.data_parallel_shard_degree", "all", 2, 3,
        matters=lambda at: _has_replicas(at) and at.sharding != "none",
    )  # fmt: skip
    sequence_parallel: bool = _option("parallel.sequence_parallel", matters=lambda at: at.tp > 1)
    # verify runs on CPUs, where auto is off
    tp_comm_overlap: bool | str = _option(
        "parallel.tp_comm_overlap",
        *("auto", True),
        matters=lambda at: at.tp > 1 and at.sequence_parallel,
    )
    balance_images: bool = _option("parallel.balance_images", matters=lambda at: at.dp > 1)
    cp_method: str = _option("parallel.cp_method", matters=lambda at: at.cp > 1 or at.dynamic_cp)
    hierarchical_cp_size: int = _option(
        "parallel.hierarchical_cp_size", 2, others=_ring_sizes,
        matters=lambda at: at.cp > 1 and at.cp_method == "hybrid",
    )  # fmt: skip
    dynamic_cp: bool = _option("parallel.dynamic_cp", matters=_has_replicas)
    # memory and kernels
    recompute: str = _option("memory.recompute")
    recompute_parts: tuple[str, ...] = _option(
        "memory.recompute_parts", ("attention",), ("activation",), ("norm",), ("attention", "activation", "norm"),
        matters=lambda at: at.recompute == "selective",
    )  # fmt: skip
    recompute_every: int = _option(
        "memory.recompute_every", 1, 2, matters=lambda at: at.recompute == "full"
    )
    offload: tuple[str, ...] = _option("memory.offload", (), ("activations", "optimizer"))
    # Every rank compiles for itself, for seconds, whatever the number of ranks: few are enough.
    kernels: str = _option(
        "run.kernels", "eager", "compile", matters=lambda at: at.world_size <= FEW_RANKS
    )
    # last, and of jobs with images alone: it changes no draw of others
    cuts_vision_tower: bool = _option(
        "model.vision.tensor_parallel",
        matters=lambda at: at.tp > 1,
        is_of=lambda job: job.model.vision.is_on,
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def degree(self, axis: str) -> int:
        """Return the degree of ``axis``."""
        return int(getattr(self, axis))

    def value(self, option: Option) -> Any:
        """Return the layout's value of ``option``."""
        return getattr(self, option.name)

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline rank, over which experts are distributed."""
        return self.tp * self.cp * self.dp

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.chunks

    def with_value(self, name: str, value: object) -> Layout:
        """Return the layout with one degree or option changed.

        Chunks are adapted to the schedule. Stages set by hand are reset if their number changes, and so
        are options that no longer matter: a job is refused if it sets a field that nothing reads.
        """
        change: dict[str, Any] = {name: value}
        # adapt chunks and stages to the change
        if name == "schedule":
            kind = SCHEDULES[str(value)]
            change["chunks"] = min(max(self.chunks, kind.least_chunks), kind.most_chunks)
        changed = replace(self, **change)
        if changed.num_stages != self.num_stages:
            changed = changed.without_stages_by_hand()
        idle = [option for option in OPTIONS if not option.matters(changed)]
        return replace(changed, **{option.name: option.simplest for option in idle})

    def without_stages_by_hand(self) -> Layout:
        """Return the layout without layer counts of single stages."""
        kind = self.stages if self.stages in KINDS else SIMPLEST_STAGES
        return replace(self, stages=kind, first_stage_layers="even", last_stage_layers="even")

    def grid(self) -> str:
        """Return the degrees in short form, such as ``tp2-pp2``."""
        parts = [f"{axis}{self.degree(axis)}" for axis in DEGREES if self.degree(axis) > 1]
        return "-".join(parts) or "one-rank"

    def extras(self) -> str:
        """Return the options that are not the simplest, except the schedule, as text."""
        found = {
            option.name.replace("_", " "): self.value(option)
            for option in OPTIONS
            if option.name != "schedule" and self.value(option) != option.simplest
        }
        return ", ".join(
            name if value is True else f"{name} {_text(value)}" for name, value in found.items()
        )

    def describe(self) -> str:
        """Return the layout as text: degrees, schedule, micro-batch size, and options not simplest."""
        extras = f", {self.extras()}" if self.extras() else ""
        return f"{self.grid()}, {self.schedule}, micro-batch {self.micro_batch_size}{extras}"

    def values(self) -> dict[str, Any]:
        """Return the layout's values by their dotted paths in a job."""
        return {path: getattr(self, name) for name, path in PATHS.items()}

    def overrides(self) -> tuple[str, ...]:
        """Return the ``--set`` texts that give a job this layout."""
        return tuple(f"{path}={_text(value)}" for path, value in self.values().items())


OPTIONS: tuple[Option, ...] = tuple(
    replace(each.metadata["option"], name=each.name) for each in fields(Layout) if each.metadata
)
"""Options of the job whose values must not change a run's numbers."""
PATHS = {
    **{axis: f"parallel.{axis}" for axis in DEGREES},
    "micro_batch_size": "schedule.micro_batch_size",
    **{option.name: option.path for option in OPTIONS},
}
"""Dotted path in a job of each field of Layout."""


def _text(value: object) -> str:
    """Return a value in the syntax of ``--set``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
