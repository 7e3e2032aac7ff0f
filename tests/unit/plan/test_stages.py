"""Stages: every way of placing layers on them covers each layer once, in order, or is refused with numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.config.parallel import ParallelSection
from raymega.errors import PlanError
from raymega.plan.stages import _cheapest_of, layer_counts, placement_faults
from tests.support.jobs import make_test_plan
from tests.support.stages import even_stages


def _counts(num_layers, num_stages, *, loss_cost=0.0, **fields):
    parallel = ParallelSection(**fields)
    assert not list(placement_faults(parallel, num_layers=num_layers, num_stages=num_stages))
    return layer_counts(parallel, num_layers=num_layers, num_stages=num_stages, loss_cost=loss_cost)


@given(
    layers=st.integers(1, 60),
    stages=st.integers(1, 16),
    embedding=st.booleans(),
    loss=st.booleans(),
    cost=st.floats(0, 20),
)
def test_every_layer_is_placed_once_and_none_is_owed(layers, stages, embedding, loss, cost):
    for fields in (
        {"stages": "auto"},
        {"is_embedding_a_layer": embedding, "is_loss_a_layer": loss},
    ):
        counts = _counts(layers, stages, loss_cost=cost, **fields)
        assert sum(counts) == layers and len(counts) == stages and min(counts) >= 0


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, (4, 4, 4, 4)),
        ({"first_stage_layers": 1}, (1, 5, 5, 5)),
        ({"first_stage_layers": 3, "last_stage_layers": 1}, (3, 6, 6, 1)),
        ({"is_embedding_a_layer": True, "is_loss_a_layer": True}, (3, 5, 5, 3)),
        ({"is_loss_a_layer": True}, (4, 5, 4, 3)),
        ({"stages": "Ett|t*6|(tt)*3|ttL"}, (2, 6, 6, 2)),
        ({"stages": "E|(t*8|)*2L"}, (0, 8, 8, 0)),
        ({"stages": "Et*3 | (tt|)*1, t*11L"}, None),
    ],
    ids=str,
)
def test_sixteen_layers_on_four_stages(fields, counts):
    parallel = ParallelSection(**fields)
    if counts is None:
        (fault,) = placement_faults(parallel, num_layers=16, num_stages=4)
        assert "it cuts 3 stages" in fault.rule
        return
    assert _counts(16, 4, **fields) == counts


def test_auto_gives_the_last_stage_fewer_layers_the_dearer_the_loss_is():
    assert _counts(16, 4, stages="auto", loss_cost=0.0) == (4, 4, 4, 4)
    assert _counts(16, 4, stages="auto", loss_cost=2.0) == (4, 5, 4, 3)
    assert _counts(16, 4, stages="auto", loss_cost=40.0) == (5, 6, 5, 0)


@given(
    layers=st.integers(1, 20),
    stages=st.integers(2, 8),
    by_hand=st.integers(0, 20),
    end=st.sampled_from(["first_stage_layers", "last_stage_layers"]),
    embedding=st.booleans(),
    loss=st.booleans(),
)
def test_what_is_set_by_hand_stays(layers, stages, by_hand, end, embedding, loss):
    fields = {end: min(by_hand, layers), "is_embedding_a_layer": embedding, "is_loss_a_layer": loss}
    counts = _counts(layers, stages, **fields)
    assert counts[0 if end.startswith("first") else -1] == fields[end]
    assert sum(counts) == layers and min(counts) >= 0


@given(layers=st.integers(2, 40), stages=st.integers(2, 8), cost=st.floats(0, 10))
def test_no_other_last_stage_is_cheaper_than_autos(layers, stages, cost):
    def cost_of(counts):
        return max(max(counts[:-1]), counts[-1] + cost)

    found = cost_of(_counts(layers, stages, stages="auto", loss_cost=cost))
    for last in range(layers + 1):
        others = -(-(layers - last) // (stages - 1))
        assert found <= max(others, last + cost) + 1e-9


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"stages": "Etx|tL"}, "made of E, t, L"),
        ({"stages": "Et*99999999999999999999|L"}, "shorter than 100,000"),
        ({"stages": "E((((t*99999)*99999)*99999)*99999)*1|L"}, "shorter than 100,000"),
        ({"stages": "tE|ttL"}, "begin with its one E"),
        ({"stages": "Ett|t"}, "end with its one L"),
        ({"stages": "Ett|tL"}, "it has 3 t, and model.num_layers=4"),
        ({"first_stage_layers": 5}, "they must make model.num_layers=4"),
        ({"first_stage_layers": 1, "last_stage_layers": 1}, "with 0 other stages"),
        (
            {"stages": "auto", "first_stage_layers": 1},
            "it has an effect only with parallel.stages=even",
        ),
        ({"stages": "Ett|ttL", "last_stage_layers": 2}, "and that is 'Ett|ttL'"),
        ({"stages": "auto", "is_loss_a_layer": True}, "and that is 'auto'"),
        ({"stages": "Ett|ttL", "is_embedding_a_layer": True}, "only with parallel.stages=even"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(fields, rule):
    (fault,) = placement_faults(ParallelSection(**fields), num_layers=4, num_stages=2)
    assert rule in fault.rule


def test_rank_with_nothing_is_refused_but_not_an_empty_stage():
    plan = make_test_plan("parallel.pp=3", "parallel.stages=E|tttt|L")
    assert [stage.num_layers for stage in plan.stages] == [0, 4, 0]
    with pytest.raises(PlanError, match="rank 1 of the pipeline gets none"):
        make_test_plan("parallel.pp=3", "parallel.stages=Ett||ttL")
    chunks = ["schedule.chunks=2", "parallel.stages=Et||tt|tL"]
    assert make_test_plan("parallel.pp=2", *chunks).stages[1].num_layers == 0


@given(num_layers=st.integers(1, 100), num_stages=st.integers(1, 32))
def test_layers_are_split_once_in_order_and_evenly(num_layers, num_stages):
    stages = even_stages(num_layers=num_layers, num_stages=num_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    counts = [stage.num_layers for stage in stages]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("layers", "counts"), [(5, [1, 2, 1, 1]), (6, [1, 2, 2, 1]), (3, [1, 1, 1, 0])]
)
def test_remainder_goes_to_the_middle(layers, counts):
    stages = even_stages(num_layers=layers, num_stages=4)
    assert [stage.num_layers for stage in stages] == counts
    assert stages[0].is_first and stages[-1].is_last


@pytest.mark.parametrize("dear", [0, 3, 7])
@pytest.mark.parametrize("num_stages", [2, 4, 8, 9])
def test_auto_leaves_no_stage_but_the_last_without_a_layer(dear, num_stages):
    """One layer that costs as much as all others a hundred times decides the dearest stage, and nothing else."""
    costs = [100.0 if layer == dear else 1.0 for layer in range(8)]
    counts = layer_counts(
        ParallelSection(stages="auto"),
        num_layers=8,
        num_stages=num_stages,
        loss_cost=0.5,
        costs=costs,
    )
    assert sum(counts) == 8 and min(counts[:-1]) >= 1


def _tried_out(costs, num_stages, loss_cost):
    """Return the split of all that there are by the same order of ties: the dearest stage, then fewer layers first."""
    best = {n: (sum(costs[:n]), (n,)) for n in range(1, len(costs) + 1)}
    for stage in range(1, num_stages):
        is_last = stage + 1 == num_stages
        best = {
            n: min(
                (max(dearest, sum(costs[first:n]) + is_last * loss_cost), (*counts, n - first))
                for first, (dearest, counts) in best.items()
                if first + (not is_last) <= n
            )
            for n in range(min(best) + (not is_last), len(costs) + 1)
        }
    return best[len(costs)][1]


@given(
    costs=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    stages=st.integers(2, 5),
    loss=st.integers(0, 9),
)
def test_a_split_by_cost_is_the_best_of_all(costs, stages, loss):
    stages = min(stages, len(costs) + 1)
    assert _cheapest_of(costs, stages, loss) == _tried_out(costs, stages, loss)


def test_thousands_of_unlike_layers_are_split_without_comparing_all_pairs():
    class Counted(float):
        """Cost that counts how often a sum is compared."""

        num = 0

        def __sub__(self, other):
            Counted.num += 1
            return float(self) - float(other)

        def __add__(self, other):
            return Counted(float(self) + float(other))

        __radd__ = __add__

    costs = [Counted(1 + layer % 3) for layer in range(2000)]
    assert sum(_cheapest_of(costs, 4, 2.0)) == 2000
    assert Counted.num < 2000 * 4 * 40  # all pairs are 6,000,000
