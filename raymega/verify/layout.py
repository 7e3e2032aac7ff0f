"""Layout: one way to run a job, as values, and the options that it is made of.

Which of them are legal for a job is raymega.verify.legal_layouts's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, get_args

from raymega.config.schema import Job, MemorySection, ParallelSection, RunSection, ScheduleSection
from raymega.plan.grid import AXES
from raymega.plan.stages import EVEN_ONLY, KINDS, LAYER, even_counts
from raymega.plan.validation.unused_fields import PARTNERS
from raymega.schedule.table import MANY, SCHEDULES

DEGREES = ("tp", "cp", "pp", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SIMPLEST_SCHEDULE = "gpipe"
SIMPLEST_STAGES = "even"
FEW_RANKS = 2
"""Layouts of at most so many ranks try compiled kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of the axes, and what else may not change a run's numbers: see OPTIONS."""

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
        """Size of ``axis``."""
        return int(getattr(self, axis))

    def value(self, option: Option) -> Any:
        """What the layout has for ``option``."""
        return getattr(self, option.name)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline rank, over which experts are shared out."""
        return self.tp * self.cp * self.dp

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.chunks

    def with_value(self, name: str, value: object) -> Layout:
        """The same but for one degree or option.

        Chunks follow the schedule, and stages that were set by hand for another number of them go, as
        do options that would have nothing to say.
        """
        change: dict[str, Any] = {name: value}
        if name == "schedule":
            kind = SCHEDULES[str(value)]
            change["chunks"] = min(max(self.chunks, kind.least_chunks), kind.most_chunks)
        changed = replace(self, **change)
        if changed.num_stages != self.num_stages:
            changed = changed.without_stages_by_hand()
        unread: dict[str, Any] = {
            option.name: option.simplest
            for option in OPTIONS
            if option.path in REFUSED_UNREAD and not option.matters(changed)
        }
        return replace(changed, **unread)

    def without_stages_by_hand(self) -> Layout:
        """The same, no stage told how many layers it has."""
        kind = self.stages if self.stages in KINDS else SIMPLEST_STAGES
        return replace(self, stages=kind, first_stage_layers="even", last_stage_layers="even")

    def reads(self, setting: str) -> bool:
        """Whether the schedule goes by this field of its section."""
        least = SCHEDULES[self.schedule].reads.get(setting, MANY)
        return self.pp > 1 and self.chunks >= least

    @property
    def is_split_evenly(self) -> bool:
        """There are stages, and layers are shared out over them by ``even``."""
        return self.num_stages > 1 and self.stages == SIMPLEST_STAGES

    def grid(self) -> str:
        """Short form of the degrees, such as ``tp2-pp2``."""
        parts = [f"{axis}{self.degree(axis)}" for axis in DEGREES if self.degree(axis) > 1]
        return "-".join(parts) or "one-rank"

    def extras(self) -> str:
        """Options that are not the simplest, the schedule apart; empty when all are."""
        found = [
            (option.name.replace("_", " "), self.value(option))
            for option in OPTIONS
            if option.name != "schedule" and self.value(option) != option.simplest
        ]
        return ", ".join(
            name if value is True else f"{name} {_text(value)}" for name, value in found
        )

    def describe(self) -> str:
        """Everything that differs from the plainest layout of these degrees, and the schedule."""
        extras = f", {self.extras()}" if self.extras() else ""
        return f"{self.grid()}, {self.schedule}, micro-batch {self.micro_batch_size}{extras}"

    def overrides(self) -> tuple[str, ...]:
        """The ``--set`` texts that give a job this layout."""
        return (
            *(f"parallel.{axis}={self.degree(axis)}" for axis in DEGREES),
            f"schedule.micro_batch_size={self.micro_batch_size}",
            *(f"{option.path}={_text(self.value(option))}" for option in OPTIONS),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A field of the job that may differ between layouts of one run.

    Attributes:
        name: Its name in Layout.
        path: Its dotted path in the job.
        values: What may be drawn, the simplest first.
        others: What may be drawn besides, of a job and a layout that has its degrees and chunks.
        matters: Whether it changes anything on a layout; where it does not, the simplest is drawn.
    """

    name: str
    path: str
    values: tuple[Any, ...]
    others: Callable[[Job, Layout], tuple[Any, ...]] = lambda _job, _layout: ()
    matters: Callable[[Layout], bool] = lambda _layout: True

    @property
    def simplest(self) -> Any:
        """The value of the plainest layout."""
        return self.values[0]


def _allowed(section: type[Any], field: str) -> tuple[Any, ...]:
    """What the job file allows for a field, in the order in which it says so."""
    return get_args(section.model_fields[field].annotation)


def _expert_degrees(job: Job, layout: Layout) -> tuple[int, ...]:
    """Into how many parts experts may be cut on a layout."""
    if not job.model.moe.num_experts:
        return ()
    ranks = layout.stage_size
    return tuple(degree for degree in range(2, ranks + 1) if ranks % degree == 0)


def _stage_texts(job: Job, layout: Layout) -> tuple[str, ...]:
    """Uneven placements: all layers but one a stage on the first; ends and middles without any."""
    layers, stages = job.model.num_layers, layout.num_stages
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
    """Layers of the first or the last stage: none, one, and two more than evenly."""
    layers = job.model.num_layers
    return tuple(sorted({0, min(1, layers), min(layers, layers // layout.num_stages + 2)}))


OPTIONS = (
    Option(
        name="schedule",
        path="schedule.name",
        values=tuple(
            sorted(
                _allowed(ScheduleSection, "name"),
                key=lambda name: (name != SIMPLEST_SCHEDULE, name),
            )
        ),
        matters=lambda layout: layout.pp > 1,
    ),
    Option(name="chunks", path="schedule.chunks", values=(1, 2, 3)),
    Option(
        name="microbatch_group_size_per_vp_stage",
        path="schedule.microbatch_group_size_per_vp_stage",
        values=("pp",),
        others=lambda _job, layout: (layout.pp + 1, 2 * layout.pp),
        matters=lambda layout: layout.reads("microbatch_group_size_per_vp_stage"),
    ),
    Option(
        name="max_in_flight_microbatches",
        path="schedule.max_in_flight_microbatches",
        values=("pp",),
        others=lambda _job, layout: (1, 2 * layout.pp),
        matters=lambda layout: layout.reads("max_in_flight_microbatches"),
    ),
    Option(
        name="wgrad_activation_fraction",
        path="schedule.wgrad_activation_fraction",
        values=(1.0, 0.5),
        matters=lambda layout: layout.reads("wgrad_activation_fraction"),
    ),
    Option(
        name="stages",
        path="parallel.stages",
        values=(SIMPLEST_STAGES, "auto"),
        others=_stage_texts,
        matters=lambda layout: layout.num_stages > 1,
    ),
    *(
        Option(
            name=name,
            path=f"parallel.{name}",
            values=("even",),
            others=_end_counts,
            matters=lambda layout: layout.is_split_evenly,
        )
        for name in ("first_stage_layers", "last_stage_layers")
    ),
    *(
        Option(
            name=name,
            path=f"parallel.{name}",
            values=(False, True),
            matters=lambda layout: layout.is_split_evenly,
        )
        for name in ("is_embedding_a_layer", "is_loss_a_layer")
    ),
    Option(
        name="order",
        path="parallel.order",
        values=(
            DEFAULT_ORDER,
            *("-".join(axes) for axes in permutations(AXES) if "-".join(axes) != DEFAULT_ORDER),
        ),
    ),
    Option(
        name="ep",
        path="parallel.ep",
        values=(1,),
        others=_expert_degrees,
        matters=lambda layout: layout.stage_size > 1,
    ),
    Option(
        name="etp",
        path="parallel.etp",
        values=(1,),
        others=_expert_degrees,
        matters=lambda layout: layout.stage_size > 1,
    ),
    Option(
        name="moe_token_dispatcher_type",
        path="parallel.moe_token_dispatcher_type",
        values=_allowed(ParallelSection, "moe_token_dispatcher_type"),
        matters=lambda layout: layout.ep * layout.etp > 1,
    ),
    Option(
        name="overlap_moe_expert_parallel_comm",
        path="parallel.overlap_moe_expert_parallel_comm",
        values=(False, True),
        matters=lambda layout: layout.ep * layout.etp > 1,
    ),
    Option(
        name="sharding",
        path="parallel.sharding",
        values=_allowed(ParallelSection, "sharding"),
        matters=lambda layout: layout.dp * layout.cp > 1,
    ),
    Option(
        name="data_parallel_shard_degree",
        path="parallel.data_parallel_shard_degree",
        values=("all", 2, 3),
        matters=lambda layout: layout.dp * layout.cp > 1 and layout.sharding != "none",
    ),
    Option(
        name="sequence_parallel",
        path="parallel.sequence_parallel",
        values=(False, True),
        matters=lambda layout: layout.tp > 1,
    ),
    Option(
        name="cp_method",
        path="parallel.cp_method",
        values=_allowed(ParallelSection, "cp_method"),
        matters=lambda layout: layout.cp > 1 or layout.dynamic_cp,
    ),
    Option(
        name="hierarchical_cp_size",
        path="parallel.hierarchical_cp_size",
        values=(2,),
        others=lambda _job, layout: tuple(n for n in range(3, layout.cp) if layout.cp % n == 0),
        matters=lambda layout: layout.cp > 1 and layout.cp_method == "hybrid",
    ),
    Option(
        name="dynamic_cp",
        path="parallel.dynamic_cp",
        values=(False, True),
        matters=lambda layout: layout.dp * layout.cp > 1,
    ),
    Option(
        name="recompute",
        path="memory.recompute",
        values=_allowed(MemorySection, "recompute"),
    ),
    Option(
        name="recompute_parts",
        path="memory.recompute_parts",
        values=(
            ("attention",),
            ("activation",),
            ("norm",),
            ("attention", "activation", "norm"),
        ),
        matters=lambda layout: layout.recompute == "selective",
    ),
    Option(
        name="recompute_every",
        path="memory.recompute_every",
        values=(1, 2),
        matters=lambda layout: layout.recompute == "full",
    ),
    Option(name="offload", path="memory.offload", values=((), ("activations", "optimizer"))),
    Option(
        name="kernels",
        path="run.kernels",
        values=_allowed(RunSection, "kernels"),
        # Every rank compiles for itself, for seconds, and nothing of it depends on how many there are.
        matters=lambda layout: layout.world_size <= FEW_RANKS,
    ),
)


REFUSED_UNREAD = frozenset(
    {
        *PARTNERS,
        *(f"parallel.{field}" for field in EVEN_ONLY),
        *(f"schedule.{field}" for kind in SCHEDULES.values() for field in kind.reads),
    }
)
"""Paths of fields that a job must not set where nothing goes by them."""


def _text(value: object) -> str:
    """A value as a ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
