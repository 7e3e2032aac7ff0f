"""Layout: one way to run a job, as values, and the options that it is made of.

Which of them are legal for a job is raymega.verify.legal_layouts's to say.
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


def _option(
    path: str,
    *values: Any,
    name: str = "",
    others: Callable[[Job, Layout], tuple[Any, ...]] = lambda _job, _layout: (),
    matters: Callable[[Layout], bool] = lambda _layout: True,
) -> Option:
    """The option of a field; ``values`` only where the job file's schema lists none."""
    section, _, field = path.partition(".")
    kind = Job.model_fields[section].annotation
    allowed = kind.model_fields[field].annotation  # type: ignore[union-attr]  # a section's
    listed = (False, True) if allowed is bool else get_args(allowed)
    return Option(
        name=name or field, path=path, values=values or listed, others=others, matters=matters
    )


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


def _is_read(setting: str) -> Callable[[Layout], bool]:
    return lambda layout: layout.reads(setting)


def _has_replicas(layout: Layout) -> bool:
    return layout.dp * layout.cp > 1


def _cuts_experts(layout: Layout) -> bool:
    return layout.ep * layout.etp > 1


OPTIONS = (
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
    _option("memory.recompute"),
    _option(
        "memory.recompute_parts",
        *((part,) for part in ("attention", "activation", "norm")),
        ("attention", "activation", "norm"),
        matters=lambda layout: layout.recompute == "selective",
    ),
    _option("memory.recompute_every", 1, 2, matters=lambda layout: layout.recompute == "full"),
    _option("memory.offload", (), ("activations", "optimizer")),
    # Every rank compiles for itself, for seconds, and nothing of it depends on how many there are.
    _option("run.kernels", matters=lambda layout: layout.world_size <= FEW_RANKS),
)
"""Fields whose values may not change a run's numbers."""


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
