"""Sampling of layouts, so that a few of them cover every axis and option, and pairs of these.

It is pure: the same job, count, bound and seed give the same layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from random import Random

from raymega.config.attention import AttentionSection
from raymega.config.schema import Job
from raymega.plan.layers.base_blocks import COMPUTE
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.stages import CUT, LAYER
from raymega.verify.layout import DEGREES, OPTIONS, Layout, Option
from raymega.verify.legal_layouts import fault_counter, fixed_size, legal_shapes, mend

Feature = tuple[object, ...]
Pair = tuple[Feature, Feature]
MICRO_BATCH_SIZES = (1, 2, 3, 4)
SHAPES = 8
"""Number of degree choices that a pick considers: SHAPES with the largest gain, SHAPES at random."""
DRESSES = 3
"""Number of random option sets tried on each choice of degrees."""
AIMS = 8
"""Number of option values not covered yet that a pick builds candidates around."""
TRIES = 3
"""Number of degree choices on which a wanted option value is tried, before it counts as impossible."""
WEIGHTS = {
    "axis": 100, "pair": 5, "uneven": 30, "schedule": 5, "micro": 4, "kernels": 12, "degree": 4, "cp_method": 10,
    "overlap_moe_expert_parallel_comm": 60, "ep": 20, "etp": 20, "microbatch_group_size_per_vp_stage": 4, "max_in_flight_microbatches": 4, "wgrad_activation_fraction": 4,
}  # fmt: skip
"""Gain of covering a feature for the first time; 1 where none is given. A new axis outweighs any number of
new options. Weights in between favour features that few layouts can have, such as compiled kernels."""
PAIR_GAIN, OWN_PAIR_GAIN, OWN_GAIN = 0.05, 0.5, 20
"""Gain of a new pair of features, of one of two that the job's own features bear on, and of such a feature."""
OWN_METHOD_GAIN = 50
"""Gain of a cp method where a part of the job has code for each: MLA with experts otherwise leaves one out of eight layouts."""
BEARS_ON: tuple[tuple[Callable[[Job], object], frozenset[str]], ...] = (
    (lambda job: job.model.attention_dropout, frozenset({"cp", "cp_method", "tp", "recompute"})),
    (lambda job: job.model.hidden_dropout, frozenset({"cp", "sequence_parallel", "recompute", "pp"})),
    (
        lambda job: job.model.moe.num_experts,
        frozenset({
            "ep", "etp", "moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm", "sharding", "tp",
            "data_parallel_shard_degree", "cp",
        }),
    ),
    (lambda job: job.data.packing != "none", frozenset({"cp", "cp_method", "dynamic_cp", "dp"})),
    (lambda job: not parts_of(job.model).is_causal, frozenset({"cp", "cp_method", "sequence_parallel", "pp", "dp"})),
    (
        lambda job: parts_of(job.model).is_encoder_decoder,
        frozenset({"tp", "cp", "pp", "sequence_parallel", "stages", "schedule", "recompute"}),
    ),
    (
        lambda job: job.model.vision.is_on,
        frozenset({
            "tp", "cp", "cp_method", "sequence_parallel", "pp", "dp", "sharding", "schedule", "recompute", "balance_images",
            "cuts_vision_tower",
        }),
    ),
    (
        # windows, chunks, caps, sinks, positions and temperatures of layers: each cp method has code for them
        lambda job: job.model.attention != AttentionSection(),
        frozenset({"cp", "cp_method", "tp", "recompute"}),
    ),
    (lambda job: job.model.num_nextn_predict_layers, frozenset({"pp", "chunks", "stages", "cp", "schedule"})),
    (lambda job: job.model.mla.kv_lora_rank, frozenset({"tp", "cp", "cp_method", "sequence_parallel"})),
    (
        lambda job: job.model.linear_attention.num_key_heads,
        frozenset({"tp", "cp", "cp_method", "sequence_parallel", "recompute", "pp"}),
    ),
    (lambda job: job.optimizer.name == "muon", frozenset({"tp", "sharding", "dp", "pp"})),
    (
        lambda job: job.optimizer.state_dtype == "8bit",
        frozenset({"tp", "sharding", "data_parallel_shard_degree", "dp"}),
    ),
    (lambda job: job.model.lora.use_dora, frozenset({"tp", "sequence_parallel", "sharding", "recompute"})),
    (
        lambda job: job.model.lora.base_dtype != COMPUTE,
        frozenset({"tp", "dp", "sharding", "data_parallel_shard_degree", "pp", "chunks", "recompute"}),
    ),
    (lambda job: job.model.head.kind == "embedding", frozenset({"dp", "cp", "pp", "sequence_parallel"})),
    (lambda job: job.precision.fp8 != "none", frozenset({"tp", "sharding", "sequence_parallel", "pp"})),
)  # fmt: skip
"""Features of a job, and the axes and options whose code they run through: their pairs are drawn first."""


SIMPLEST = frozenset((option.name, option.simplest) for option in OPTIONS)
"""Features of the simplest layout, of which no pairs are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Layouts that were drawn, and the pairs of options and degrees of all that were looked at."""

    layouts: tuple[Layout, ...]
    pairs: frozenset[Pair]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCoverage:
    """Pairs of options and degrees, none the simplest, that layouts cover of those that are possible.

    Attributes:
        num_drawn: Number of pairs that the layouts cover.
        num_possible: Number of these and of pairs that a layout looked at has; others may exist.
        own_left_out: Pairs not covered that the job's own features run through, in words, by the first of each.
    """

    num_drawn: int
    num_possible: int
    own_left_out: tuple[str, ...]


def draw_layouts(job: Job, *, own: Layout, count: int, max_ranks: int, seed: int) -> Draw:
    """Draw at most ``count`` distinct legal layouts of 2 to ``max_ranks`` ranks.

    ``own``, the layout of the unshrunk job, comes first if it is legal, with its hand-set stages if they
    still fit. Each further pick is the candidate with the largest gain in features and pairs of features not
    yet covered. Some candidates are built around an option value that is not covered, for those that random
    options hardly ever have.
    """
    maker = _CandidateMaker(job, max_ranks, Random(seed))
    # the job's own layout
    own = own if maker.can_run(own) else own.without_stages_by_hand()
    is_own_possible = 1 < own.world_size <= max_ranks and maker.can_run(own)
    chosen = [own] if is_own_possible else []
    met = _Coverage(job)
    for layout in chosen:
        met.add(layout)
    possible: set[Pair] = set()
    # greedy cover of features and pairs
    while maker.shapes and len(chosen) < count:
        candidates = [each for each in maker.candidates(met) if each not in chosen]
        if not candidates:
            break
        possible.update(*(_seen(each).pairs for each in candidates))
        maker.random.shuffle(candidates)
        chosen.append(max(candidates, key=met.gain))
        met.add(chosen[-1])
    return Draw(layouts=tuple(chosen[:count]), pairs=frozenset(possible | met.pairs))


def left_out(job: Job, layouts: Iterable[Layout], *, max_ranks: int) -> tuple[str, ...]:
    """Return in words the option values and degrees that the job can have and none of ``layouts`` has.

    The simplest value of an option is not among them.
    """
    maker, met = _CandidateMaker(job, max_ranks, Random(0)), _Coverage(job)
    for layout in layouts:
        met.add(layout)
    missing = (aim for aim in maker.aims(met) if aim not in SIMPLEST)
    return _texts([aim for aim in missing if maker.reach(aim) is not None])


def pair_coverage(job: Job, layouts: Iterable[Layout], possible: Collection[Pair]) -> PairCoverage:
    """Return how many pairs ``layouts`` cover of ``possible`` ones, and which of the job's own they do not."""
    met = _Coverage(job)
    for layout in layouts:
        met.add(layout)
    missing = sorted((pair for pair in set(possible) - met.pairs if met.is_own_pair(pair)), key=str)
    seconds: dict[str, list[Feature]] = defaultdict(list)
    for first, second in missing:
        seconds[_texts([first])[0]].append(second)
    return PairCoverage(
        num_drawn=len(met.pairs),
        num_possible=len(met.pairs.union(possible)),
        own_left_out=tuple(
            f"{first} with {', '.join(_texts(found))}" for first, found in seconds.items()
        ),
    )


def features(layout: Layout) -> frozenset[Feature]:
    """Return the features that a layout covers: axes, pairs of axes, degrees, option values."""
    axes = [axis for axis in DEGREES if layout.degree(axis) > 1]
    # axes alone and in pairs, degrees, odd degrees, then options with an effect
    found: set[Feature] = {("axis", axis) for axis in axes}
    found |= {("pair", a, b) for a in axes for b in axes if a < b}
    found |= {("degree", axis, layout.degree(axis)) for axis in axes}
    found |= {("uneven", axis) for axis in axes if not is_power_of_two(layout.degree(axis))}
    found.add(("micro", layout.micro_batch_size))
    found |= {_met(option, layout) for option in OPTIONS if option.matters(layout)}
    return frozenset(found)


def is_power_of_two(number: int) -> bool:
    """Return whether ``number``, at least 1, is a power of two."""
    return number & (number - 1) == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """Features of one layout, and the pairs of those that are not the simplest."""

    all: frozenset[Feature]
    pairs: frozenset[Pair]


class _Coverage:
    """Features and pairs that the layouts chosen so far cover, and what another one would add."""

    def __init__(self, job: Job) -> None:
        self.features: set[Feature] = set()
        self.pairs: set[Pair] = set()
        self._own = frozenset().union(*(names for holds, names in BEARS_ON if holds(job)))

    def add(self, layout: Layout) -> None:
        seen = _seen(layout)
        self.features |= seen.all
        self.pairs |= seen.pairs

    def gain(self, layout: Layout) -> float:
        """Return the gain of the features and pairs that ``layout`` adds."""
        seen = _seen(layout)
        gain: float = sum(map(self._weight, seen.all - self.features))
        for pair in seen.pairs - self.pairs:
            gain += OWN_PAIR_GAIN if self.is_own_pair(pair) else PAIR_GAIN
        return gain

    def is_own_pair(self, pair: Pair) -> bool:
        """Return whether the job's own features bear on both of a pair."""
        return all(map(self.is_own, pair))

    def is_own(self, feature: Feature) -> bool:
        """Return whether the job's own features bear on this one."""
        return _name(feature) in self._own

    def _weight(self, feature: Feature) -> float:
        weight = WEIGHTS.get(str(feature[0]), 1)
        is_option = feature[0] not in ("axis", "pair", "degree", "uneven")
        if not (is_option and self.is_own(feature)):
            return weight
        return weight + (OWN_METHOD_GAIN if feature[0] == "cp_method" else OWN_GAIN)


class _CandidateMaker:
    """Maker of candidates: degrees dressed in random options, or around an option value that is wanted."""

    def __init__(self, job: Job, max_ranks: int, random: Random) -> None:
        self.random, self._job = random, job
        self._count = fault_counter(job)
        self.shapes = list(legal_shapes(job, max_ranks))
        self._options = [option for option in OPTIONS if option.is_of(job)]
        self._reached: dict[Feature, Layout | None] = {}

    def can_run(self, layout: Layout) -> bool:
        """Return whether the job can run on ``layout``."""
        return self._count(layout) == 0

    def candidates(self, met: _Coverage) -> Iterator[Layout]:
        """Yield layouts to choose from, each with options drawn anew."""
        self.random.shuffle(self.shapes)
        best = sorted(self.shapes, key=met.gain, reverse=True)
        for shape in best[:SHAPES] + self.shapes[:SHAPES]:
            for _ in range(DRESSES):
                yield self._dress(shape)
        # around what is not covered: first what the job's own features bear on
        aims = sorted(self.aims(met), key=met.is_own, reverse=True)
        for aim in aims[:AIMS]:
            layout = self.reach(aim)
            if layout is not None:
                yield layout
                yield self._dress(layout, keep=str(aim[0]))

    def aims(self, met: _Coverage) -> list[Feature]:
        """Return the option values and degrees that are not covered, in random order."""
        # degrees on which many options matter, so that further values show
        wide = max(self.shapes, key=lambda shape: len(_seen(shape).all), default=Layout())
        found: set[Feature] = {
            ("degree", axis, n)
            for shape in self.shapes
            for axis in DEGREES
            if (n := shape.degree(axis)) > 1
        }
        for option in self._options:
            for value in (*option.values, *option.others(self._job, wide)):
                found.add(_met(option, replace(wide, **{option.name: value})))
        missing = sorted(found - met.features, key=str)
        self.random.shuffle(missing)
        return missing

    def reach(self, aim: Feature) -> Layout | None:
        """Return a legal layout with the feature ``aim``, on few degrees tried; None if there is none."""
        if aim not in self._reached:
            self._reached[aim] = next(self._with(aim), None)
        return self._reached[aim]

    def _with(self, aim: Feature) -> Iterator[Layout]:
        # a degree: any shape that has it
        if aim[0] == "degree":
            yield from (shape for shape in self.shapes if aim in features(shape))
            return
        option = next(each for each in OPTIONS if each.name == aim[0])
        forced = [
            layout
            for shape in self.random.sample(self.shapes, len(self.shapes))
            for value in (*option.values, *option.others(self._job, shape))
            if _met(option, layout := replace(shape, **{option.name: value})) == aim
        ]
        # degrees on which the option has an effect as they are come first
        for each in sorted(forced, key=lambda layout: aim not in features(layout))[:TRIES]:
            mended = mend(self._job, each, self._count, keep=(option.name,))
            if mended is not None and aim in features(mended):
                yield mended

    def _dress(self, shape: Layout, *, keep: str = "") -> Layout:
        """Return the shape with random options, dropping those that are not legal together.

        The option named ``keep`` stays.
        """
        sizes = [n for n in MICRO_BATCH_SIZES if n <= self._job.data.global_batch_size]
        size = fixed_size(self._job) or self.random.choice(
            [*sizes, self._job.schedule.micro_batch_size]
        )
        dressed = replace(shape, micro_batch_size=size)
        dressed = dressed if self.can_run(dressed) else shape
        for option in self._options:
            # The draw is made even where it has no effect, so that later draws do not depend on that.
            value = self.random.choice([*option.values, *option.others(self._job, dressed)])
            if option.name != keep and option.matters(dressed) and value != dressed.value(option):
                changed = dressed.with_value(option.name, value)
                is_kept = not keep or getattr(changed, keep) == getattr(dressed, keep)
                dressed = changed if is_kept and self.can_run(changed) else dressed
        return dressed


@lru_cache(maxsize=4096)
def _seen(layout: Layout) -> _Seen:
    found = features(layout)
    singles = (each for each in found if each[0] not in ("axis", "pair", "uneven", "micro"))
    paired = sorted((each for each in singles if each not in SIMPLEST), key=str)
    return _Seen(all=found, pairs=frozenset(combinations(paired, 2)))


def _name(feature: Feature) -> str:
    """Return the axis or option of a feature."""
    return str(feature[1] if feature[0] in ("axis", "degree", "uneven") else feature[0])


def _texts(found: Sequence[Feature]) -> tuple[str, ...]:
    """Return features in words, by axis and option, such as ``schedule zb_h1, zb_h2``."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for *_, name, value in sorted(found, key=str):
        by_name[str(name).replace("_", " ")].append(
            "+".join(value) if isinstance(value, tuple) else str(value)
        )
    return tuple(f"{name} {', '.join(values)}" for name, values in by_name.items())


def _met(option: Option, layout: Layout) -> Feature:
    """Return an option's value as a feature, with the many values of some options merged into few.

    Rank orders are merged by their fastest axis, placements by whether a stage is empty, grids beside the run by
    whether they have several ranks, and numbers in place of ``pp`` by whether they are below it.
    """
    value = layout.value(option)
    if option.name == "order":
        value = value.split("-")[0]
    if option.name == "stages" and value not in option.values:
        value = "uneven" if all(LAYER in stage for stage in value.split(CUT)) else "empty"
    if option.name == "eval_tasks_grid" and value != option.simplest:
        value = "several ranks"
    if isinstance(value, int) and "pp" in option.values:
        value = "less" if value < layout.pp else "more"
    return (option.name, value)
