"""Layout: degrees and options with which a job runs, and the table of these options.

`legal_layouts.py` decides which layouts are legal for a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, get_args

from raymega.config.schema import Job
from raymega.plan.grid import AXES
from raymega.plan.stages import EVEN_ONLY, KINDS, LAYER, even_counts
from raymega.plan.validation.unused_fields import PARTNERS
from raymega.schedule.table import MANY, SCHEDULES

DEGREES = ("tp", "cp", "pp", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SIMPLEST_SCHEDULE = "gpipe"
SIMPLEST_STAGES = "even"
FEW_RANKS = 2
"""Largest number of ranks with which a layout tries compiled kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of the axes, and all options that must not change a run's numbers: see OPTIONS."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    chunks: int = 1
    stages: str = SIMPLEST_STAGES
    first_stage_layers: int | str = "even"
    last_stage_layers: int | str = "even"
    is_embedding_a_layer: bool = False
    is_loss_a_layer: bool = False
    schedule: str = SIMPLEST_SCHEDULE
    microbatch_group_size_per_vp_stage: int | str = "pp"
    max_in_flight_microbatches: int | str = "pp"
    wgrad_activation_fraction: float = 1.0
    order: str = DEFAULT_ORDER
    ep: int = 1
    etp: int = 1
    moe_token_dispatcher_type: str = "all_to_all"
    overlap_moe_expert_parallel_comm: bool = False
    sharding: str = "none"
    data_parallel_shard_degree: int | str = "all"
    sequence_parallel: bool = False
    cp_method: str = "ring"
    hierarchical_cp_size: int = 2
    dynamic_cp: bool = False
    recompute: str = "none"
    recompute_parts: tuple[str, ...] = ("attention",)
    recompute_every: int = 1
    offload: tuple[str, ...] = ()
    kernels: str = "eager"

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
        are options that no longer matter.
        """
        change: dict[str, Any] = {name: value}
        # adapt chunks and stages to the change
        if name == "schedule":
            kind = SCHEDULES[str(value)]
            change["chunks"] = min(max(self.chunks, kind.least_chunks), kind.most_chunks)
        changed = replace(self, **change)
        if changed.num_stages != self.num_stages:
            changed = changed.without_stages_by_hand()
        # A job is refused if it sets a field that nothing reads.
        unread: dict[str, Any] = {
            option.name: option.simplest
            for option in OPTIONS
            if option.path in REFUSED_UNREAD and not option.matters(changed)
        }
        return replace(changed, **unread)

    def without_stages_by_hand(self) -> Layout:
        """Return the layout without layer counts of single stages."""
        kind = self.stages if self.stages in KINDS else SIMPLEST_STAGES
        return replace(self, stages=kind, first_stage_layers="even", last_stage_layers="even")

    def reads(self, setting: str) -> bool:
        """Return whether the schedule reads this field of its section."""
        least = SCHEDULES[self.schedule].reads.get(setting, MANY)
        return self.pp > 1 and self.chunks >= least

    @property
    def is_split_evenly(self) -> bool:
        """True where there are several stages, and ``even`` distributes the layers."""
        return self.num_stages > 1 and self.stages == SIMPLEST_STAGES

    def grid(self) -> str:
        """Return the degrees in short form, such as ``tp2-pp2``."""
        parts = [f"{axis}{self.degree(axis)}" for axis in DEGREES if self.degree(axis) > 1]
        return "-".join(parts) or "one-rank"

    def extras(self) -> str:
        """Return the options that are not the simplest, except the schedule, as text."""
        found = [
            (option.name.replace("_", " "), self.value(option))
            for option in OPTIONS
            if option.name != "schedule" and self.value(option) != option.simplest
        ]
        return ", ".join(
            name if value is True else f"{name} {_text(value)}" for name, value in found
        )

    def describe(self) -> str:
        """Return the layout as text: degrees, schedule, micro-batch size, and options not simplest."""
        extras = f", {self.extras()}" if self.extras() else ""
        return f"{self.grid()}, {self.schedule}, micro-batch {self.micro_batch_size}{extras}"

    def overrides(self) -> tuple[str, ...]:
        """Return the ``--set`` texts that give a job this layout."""
        return (
            *(f"parallel.{axis}={self.degree(axis)}" for axis in DEGREES),
            f"schedule.micro_batch_size={self.micro_batch_size}",
            *(f"{option.path}={_text(self.value(option))}" for option in OPTIONS),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Field of the job that may differ between layouts of one run.

    Attributes:
        name: Name of the field in Layout.
        path: Dotted path of the field in the job.
        values: Values that may be drawn, the simplest first.
        others: Function to further values, of a job and a layout with its degrees and chunks.
        matters: Function to whether the field has an effect on a layout; else the simplest is drawn.
    """

    name: str
    path: str
    values: tuple[Any, ...]
    others: Callable[[Job, Layout], tuple[Any, ...]] = lambda _job, _layout: ()
    matters: Callable[[Layout], bool] = lambda _layout: True

    @property
    def simplest(self) -> Any:
        """Simplest value."""
        return self.values[0]


def _option(
    path: str,
    *values: Any,
    name: str = "",
    others: Callable[[Job, Layout], tuple[Any, ...]] = lambda _job, _layout: (),
    matters: Callable[[Layout], bool] = lambda _layout: True,
) -> Option:
    """Return the option of a field; ``values`` only where the job's schema lists none."""
    section, _, field = path.partition(".")
    kind = Job.model_fields[section].annotation
    allowed = kind.model_fields[field].annotation  # type: ignore[union-attr]  # a section's
    listed = (False, True) if allowed is bool else get_args(allowed)
    return Option(
        name=name or field, path=path, values=values or listed, others=others, matters=matters
    )


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


def _is_read(setting: str) -> Callable[[Layout], bool]:
    return lambda layout: layout.reads(setting)


def _has_replicas(layout: Layout) -> bool:
    return layout.dp * layout.cp > 1


def _cuts_experts(layout: Layout) -> bool:
    return layout.ep * layout.etp > 1


OPTIONS = (
    # pipeline: schedule and chunks, then the fields that only some schedules read
    _option(
        "schedule.name",
        *sorted(SCHEDULES, key=lambda name: (name != SIMPLEST_SCHEDULE, name)),
        name="schedule",
        matters=lambda layout: layout.pp > 1,
    ),
    _option("schedule.chunks", 1, 2, 3),
    _option(
        "schedule.microbatch_group_size_per_vp_stage",
        "pp",
        others=lambda _job, layout: (layout.pp + 1, 2 * layout.pp),
        matters=_is_read("microbatch_group_size_per_vp_stage"),
    ),
    _option(
        "schedule.max_in_flight_microbatches",
        "pp",
        others=lambda _job, layout: (1, 2 * layout.pp),
        matters=_is_read("max_in_flight_microbatches"),
    ),
    _option(
        "schedule.wgrad_activation_fraction",
        1.0,
        0.5,
        matters=_is_read("wgrad_activation_fraction"),
    ),
    # placement of layers on stages
    _option(
        "parallel.stages",
        SIMPLEST_STAGES,
        "auto",
        others=_stage_texts,
        matters=lambda layout: layout.num_stages > 1,
    ),
    *(
        _option(
            f"parallel.{end}_stage_layers",
            "even",
            others=_end_counts,
            matters=lambda layout: layout.is_split_evenly,
        )
        for end in ("first", "last")
    ),
    *(
        _option(f"parallel.is_{end}_a_layer", matters=lambda layout: layout.is_split_evenly)
        for end in ("embedding", "loss")
    ),
    # rank order, and expert parallelism
    _option(
        "parallel.order",
        DEFAULT_ORDER,
        *("-".join(axes) for axes in permutations(AXES) if "-".join(axes) != DEFAULT_ORDER),
    ),
    *(
        _option(
            f"parallel.{degree}",
            1,
            others=_expert_degrees,
            matters=lambda layout: layout.stage_size > 1,
        )
        for degree in ("ep", "etp")
    ),
    _option("parallel.moe_token_dispatcher_type", matters=_cuts_experts),
    _option("parallel.overlap_moe_expert_parallel_comm", matters=_cuts_experts),
    # sharding of state, sequence and context parallelism
    _option("parallel.sharding", matters=_has_replicas),
    _option(
        "parallel.data_parallel_shard_degree",
        "all",
        2,
        3,
        matters=lambda layout: _has_replicas(layout) and layout.sharding != "none",
    ),
    _option("parallel.sequence_parallel", matters=lambda layout: layout.tp > 1),
    _option("parallel.cp_method", matters=lambda layout: layout.cp > 1 or layout.dynamic_cp),
    _option(
        "parallel.hierarchical_cp_size",
        2,
        others=lambda _job, layout: tuple(n for n in range(3, layout.cp) if layout.cp % n == 0),
        matters=lambda layout: layout.cp > 1 and layout.cp_method == "hybrid",
    ),
    _option("parallel.dynamic_cp", matters=_has_replicas),
    # memory and kernels
    _option("memory.recompute"),
    _option(
        "memory.recompute_parts",
        *((part,) for part in ("attention", "activation", "norm")),
        ("attention", "activation", "norm"),
        matters=lambda layout: layout.recompute == "selective",
    ),
    _option("memory.recompute_every", 1, 2, matters=lambda layout: layout.recompute == "full"),
    _option("memory.offload", (), ("activations", "optimizer")),
    # Every rank compiles for itself, for seconds, whatever the number of ranks: few are enough.
    _option("run.kernels", matters=lambda layout: layout.world_size <= FEW_RANKS),
)
"""Options of the job whose values must not change a run's numbers."""


REFUSED_UNREAD = frozenset(
    {
        *PARTNERS,
        *(f"parallel.{field}" for field in EVEN_ONLY),
        *(f"schedule.{field}" for kind in SCHEDULES.values() for field in kind.reads),
    }
)
"""Paths of fields that a job must not set where nothing reads them."""


def _text(value: object) -> str:
    """Return a value in the syntax of ``--set``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
