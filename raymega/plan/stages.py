"""Assign layers to pipeline stages: evenly, by hand, by a layout text, or by cost.

The module knows counts and costs; ``raymega.schedule.stage_placement`` places stages on ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, takewhile

from raymega.config.parallel import ParallelSection
from raymega.errors import Fault

EMBEDDING, LAYER, LOSS, CUT = "E", "t", "L", "|"
KINDS = ("even", "auto")
EVEN_ONLY = {
    field: ParallelSection.model_fields[field].default
    for field in (
        "first_stage_layers", "last_stage_layers", "is_embedding_a_layer", "is_loss_a_layer",
    )
}  # fmt: skip
"""Fields that apply to ``stages=even`` alone, with the values that leave them out."""
MAX_LENGTH = 100_000
"""Most characters of a layout text when its repetitions are written out."""
MAX_DIGITS = len(str(MAX_LENGTH))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage in layer order: layers [first_layer, first_layer + num_layers).

    ``are_ends_together`` says that the pipeline's first and last stage are on one rank, which then has
    a single copy of a tied table.
    """

    index: int
    num_stages: int
    first_layer: int
    num_layers: int
    are_ends_together: bool

    @property
    def is_first(self) -> bool:
        """True where the stage holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True where the stage holds the final norm, the head and the loss."""
        return self.index == self.num_stages - 1

    @property
    def has_tensors(self) -> bool:
        """True where the stage holds any tensor; another stage only passes activations on."""
        return self.num_layers > 0 or self.is_first or self.is_last

    @property
    def layers(self) -> range:
        """Global layer numbers of the stage."""
        return range(self.first_layer, self.first_layer + self.num_layers)


def make_stages(counts: Sequence[int], *, are_ends_together: bool = False) -> tuple[Stage, ...]:
    """Return stages with ``counts`` layers each, in layer order."""
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(
            Stage(
                index=index,
                num_stages=len(counts),
                first_layer=first,
                num_layers=count,
                are_ends_together=are_ends_together or len(counts) == 1,
            )
        )
        first += count
    return tuple(stages)


def even_counts(total: int, num_stages: int) -> list[int]:
    """Return an even split; with a remainder the stages nearest the middle get one more.

    The first and the last stage also hold the embedding and the head, so they come last in line.
    """
    if num_stages == 0:
        return []
    # the remainder, from the middle outwards
    base, extra = divmod(total, num_stages)
    middle = (num_stages - 1) / 2
    by_distance = sorted(range(num_stages), key=lambda stage: (abs(stage - middle), stage))
    favoured = set(by_distance[:extra])
    return [base + (stage in favoured) for stage in range(num_stages)]


def layer_counts(
    parallel: ParallelSection,
    *,
    num_layers: int,
    num_stages: int,
    loss_cost: float,
    costs: Sequence[float] = (),
    tower_cost: float = 0.0,
) -> tuple[int, ...]:
    """Return the layers of each stage, after :func:`placement_faults` found nothing.

    Args:
        parallel: Section ``parallel`` of the job, which states the kind of split.
        num_layers: Number of layers of the model.
        num_stages: Number of stages of the whole pipeline.
        loss_cost: Cost of head and loss in units of the last layer, for ``auto``.
        costs: Cost of each layer in the same unit, for ``auto``; empty where all are 1.
        tower_cost: Cost of a vision tower before the first layer in the same unit, for ``auto``.
    """
    # by cost, or by a layout text
    if parallel.stages == "auto":
        if tower_cost and num_stages > 1:
            return _cheapest_beside_tower(
                num_layers, num_stages, costs=costs, loss_cost=loss_cost, tower_cost=tower_cost
            )
        if costs:
            return _cheapest_of(costs, num_stages, loss_cost)
        return _cheapest(num_layers, num_stages, loss_cost)
    if parallel.stages != "even":
        return tuple(stage.count(LAYER) for stage in _expand(parallel.stages).split(CUT))
    # Even split: ends that are given stay, the other stages share the rest.
    ends = _given_ends(parallel, num_stages)
    free = [stage for stage in range(num_stages) if stage not in ends]
    # An embedding or loss that counts takes the place of a layer.
    weights = dict.fromkeys(range(num_stages), 0)
    weights[0] += parallel.is_embedding_a_layer
    weights[num_stages - 1] += parallel.is_loss_a_layer
    extra = sum(weights[stage] for stage in free)
    shares = even_counts(num_layers - sum(ends.values()) + extra, len(free))
    counts = ends | {s: share - weights[s] for s, share in zip(free, shares, strict=True)}
    return _without_debts([counts[stage] for stage in range(num_stages)], free)


def placement_faults(
    parallel: ParallelSection, *, num_layers: int, num_stages: int
) -> Iterator[Fault]:
    """Return the faults that keep the layers from being placed so."""
    if parallel.stages != "even":
        yield from _unused_faults(parallel)
        if parallel.stages not in KINDS:
            yield from _text_faults(parallel.stages, num_layers, num_stages)
        return
    # stages given by hand: the other stages must be able to hold the rest
    ends = _given_ends(parallel, num_stages)
    rest, num_free = num_layers - sum(ends.values()), num_stages - len(ends)
    if rest < 0 or (num_free == 0 and rest):
        given = ", ".join(f"stage {stage} {count}" for stage, count in ends.items())
        yield Fault(
            fact=f"layers by hand: {given}",
            rule=f"with {num_free} other stages they must make model.num_layers={num_layers}",
            remedy="change parallel.first_stage_layers or parallel.last_stage_layers",
        )


def _unused_faults(parallel: ParallelSection) -> Iterator[Fault]:
    """Return the faults of fields that are set and that only the even split reads."""
    for field, default in EVEN_ONLY.items():
        if getattr(parallel, field) != default:
            yield Fault(
                fact=f"parallel.{field}={str(getattr(parallel, field)).lower()}",
                rule=f"it has an effect only with parallel.stages=even, and that is {parallel.stages!r}",
                remedy=f"remove it (parallel.{field}={str(default).lower()}), or set parallel.stages=even",
            )


def _given_ends(parallel: ParallelSection, num_stages: int) -> dict[int, int]:
    ends = {}
    if parallel.first_stage_layers != "even":
        ends[0] = int(parallel.first_stage_layers)
    if parallel.last_stage_layers != "even":
        ends[num_stages - 1] = int(parallel.last_stage_layers)
    return ends


def _without_debts(counts: list[int], free: list[int]) -> tuple[int, ...]:
    """Return the counts with no stage below 0.

    Layers that an end is short of come from the fullest of the ``free`` stages.
    """
    # A negative count is an end whose embedding or loss counts for more than its share of layers.
    for stage, count in enumerate(counts):
        for _ in range(-count):
            counts[stage] += 1
            counts[max(free, key=lambda s: counts[s])] -= 1
    return tuple(counts)


def _cheapest(num_layers: int, num_stages: int, loss_cost: float) -> tuple[int, ...]:
    """Return the split whose most expensive stage, with the loss on the last one, is cheapest."""
    if num_stages == 1:
        return (num_layers,)

    # The other stages share the remaining layers evenly; of equal splits the fuller last stage wins.
    def cost(num_last: int) -> tuple[float, int]:
        others = -(-(num_layers - num_last) // (num_stages - 1))
        return max(others, num_last + loss_cost), -num_last

    num_last = min(range(num_layers + 1), key=cost)
    return (*even_counts(num_layers - num_last, num_stages - 1), num_last)


def _cheapest_beside_tower(
    num_layers: int, num_stages: int, *, costs: Sequence[float], loss_cost: float, tower_cost: float
) -> tuple[int, ...]:
    """Return the split of layers whose most expensive stage, a tower's among them, is cheapest, and the others even.

    The first stage has a layer at least; ``costs`` are empty where all are 1.
    """
    total = [0.0, *accumulate(costs or [1.0] * num_layers)]

    def split(num_first: int) -> tuple[int, ...]:
        if num_stages == 2:
            return (num_layers - num_first,)
        if costs:
            return _cheapest_of(costs[num_first:], num_stages - 1, loss_cost)
        return _cheapest(num_layers - num_first, num_stages - 1, loss_cost)

    @cache
    def dearest(num_first: int) -> float:
        ends = [*accumulate(split(num_first), initial=num_first)]
        *sums, last = (total[end] - total[begin] for begin, end in pairwise(ends))
        return max(*sums, last + loss_cost) if sums else last + loss_cost

    # with more layers the first stage is dearer, and the dearest of the others cheaper: the best is where they cross
    counts = range(1, num_layers + 1)
    at = bisect_left(counts, 0.0, key=lambda n: tower_cost + total[n] - dearest(n))
    num_first = min(
        counts[max(0, at - 1) : at + 1],
        key=lambda n: (max(dearest(n), tower_cost + total[n]), dearest(n)),
    )
    return (num_first, *split(num_first))


def _cheapest_of(costs: Sequence[float], num_stages: int, loss_cost: float) -> tuple[int, ...]:
    """Return the split of layers of different costs whose most expensive stage is cheapest, the loss on the last.

    All stages but the last have a layer, which makes none dearer. Where layers are too few for that, they count alike.
    """
    if len(costs) < num_stages - 1:
        return _cheapest(len(costs), num_stages, loss_cost)
    total = [0.0, *accumulate(costs)]
    # best[n]: cost of the dearest stage, and counts, of the first n layers on the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {n: (total[n], (n,)) for n in range(1, len(costs) + 1)}
    for stage in range(1, num_stages):
        is_last = stage + 1 == num_stages
        more, least = (loss_cost, 0) if is_last else (0.0, 1)
        best = {
            n: min(
                (max(best[first][0], total[n] - total[first] + more), (*best[first][1], n - first))
                for first in _cheapest_cuts(best, total, n, more=more, least=least)
            )
            for n in range(min(best) + least, len(costs) + 1)
        }
    return best[len(costs)][1]


def _cheapest_cuts(
    best: Mapping[int, tuple[float, tuple[int, ...]]],
    total: Sequence[float],
    n: int,
    *,
    more: float,
    least: int,
) -> Iterator[int]:
    """Yield the layers before a last stage that ends at layer ``n``, of which the dearer of both parts is cheapest.

    With more layers the first part is dearer and the last cheaper: the cheapest are around the place where they cross.
    """
    counts = range(min(best), min(max(best), n - least) + 1)

    def cost(at: int) -> float:
        return max(best[counts[at]][0], total[n] - total[counts[at]] + more)

    cross = bisect_left(
        counts, 0.0, key=lambda first: best[first][0] - (total[n] - total[first] + more)
    )
    near = [at for at in (cross - 1, cross) if 0 <= at < len(counts)]
    least_cost = min(map(cost, near))
    for ats in (range(cross - 1, -1, -1), range(cross, len(counts))):
        yield from (counts[at] for at in takewhile(lambda at: cost(at) == least_cost, ats))


def _expand(text: str) -> str:
    """Return the text with repetitions written out: ``Et*2|(t|)*2,L`` becomes ``Ett|t|t|L``."""
    text = re.sub(r"[\s,]", "", text)
    # innermost parentheses first, until none are left; then single letters
    while (longer := re.sub(r"\(([^()]*)\)\*(\d+)", _repeat, text)) != text:
        text = longer
    return re.sub(r"([EtL|])\*(\d+)", _repeat, text)


def _repeat(match: re.Match[str]) -> str:
    """Return a repetition written out, MAX_LENGTH characters at most.

    The work is bounded likewise, as a text of that length is refused.
    """
    times = int(match[2][:MAX_DIGITS]) if match[1] else 0
    return (match[1] * min(times, MAX_LENGTH // max(1, len(match[1])) + 1))[:MAX_LENGTH]


def _text_faults(text: str, num_layers: int, num_stages: int) -> list[Fault]:
    expanded = _expand(text)
    stages = expanded.split(CUT)
    rules = []
    # the first broken rule of the text's form; counts only in a well-formed text
    if len(expanded) >= MAX_LENGTH:
        rules.append(f"it must be shorter than {MAX_LENGTH:,} when repetitions are written out")
    elif re.search(r"[^EtL|]", expanded):
        rules.append("it must be even, auto, or made of E, t, L, |, *, numbers and parentheses")
    elif expanded.count(EMBEDDING) != 1 or not expanded.startswith(EMBEDDING):
        rules.append("it must begin with its one E, the embedding")
    elif expanded.count(LOSS) != 1 or not expanded.endswith(LOSS):
        rules.append("it must end with its one L, head and loss")
    else:
        if len(stages) != num_stages:
            rules.append(f"it cuts {len(stages)} stages, and pp * chunks={num_stages}")
        if expanded.count(LAYER) != num_layers:
            rules.append(f"it has {expanded.count(LAYER)} t, and model.num_layers={num_layers}")
    return [
        Fault(fact=f"parallel.stages={text!r}", rule=rule, remedy="for example Ett|tt|tL")
        for rule in rules
    ]
