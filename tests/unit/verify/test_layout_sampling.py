"""Draws are legal, distinct, repeatable, and meet every axis and option that exists."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import job_faults
from raymega.verify import layout_sampling
from raymega.verify.layout import DEGREES, OPTIONS, Layout
from raymega.verify.layout_sampling import features
from raymega.verify.legal_layouts import (
    fault_counter,
    fixed_size,
    is_legal,
    layout_of,
    legal_shapes,
    reference_layout,
    values_on,
    with_layout,
)
from raymega.verify.shrink import shrink_job
from raymega.verify.tasks import legal_grids
from tests.unit.verify.jobs import make_job


def draw_layouts(job, **options):
    return layout_sampling.draw_layouts(job, **options).layouts


JOB = make_job("run.eval_tasks=[{task: perplexity, path: drawn}]")
OWN = layout_of(JOB)
SCHEDULES_OF_JOBS = next(option for option in OPTIONS if option.name == "schedule").values
AXES = {("axis", axis) for axis in DEGREES}


ELSEWHERE = (
    "dynamic_cp",
    "hierarchical_cp_size",
    "ep",
    "etp",
    "moe_token_dispatcher_type",
    "overlap_moe_expert_parallel_comm",
    "balance_images",
    "cuts_vision_tower",
)
"""Options that a few layouts of a small dense job cannot meet."""


def _met(layouts):
    return set().union(*map(features, layouts))


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        make_job("model.moe={num_experts: 4, top_k: 2}"),
        make_job("data.packing=best_fit", "model.attention_dropout=0.1"),
    ],
    ids=["dense", "experts", "packed"],
)
def test_layouts_that_no_one_has_looked_at_have_the_faults_of_the_job_on_them(job):
    """What is remembered of one layout is right for others: options at random, most of them refused."""
    count, random, seen = fault_counter(job), Random(0), set()
    for _ in range(150):
        degrees = {axis: random.choice([1, 2, 3]) for axis in DEGREES}
        layout = Layout(**degrees, micro_batch_size=fixed_size(job) or 1)
        for option in random.sample(OPTIONS, 6):
            value = random.choice([*option.values, *option.others(job, layout)])
            layout = replace(layout, **{option.name: value})
        own = layout.dp > job.data.global_batch_size
        is_beside = layout.eval_tasks_on == "beside"
        own += is_beside and layout.eval_tasks_grid not in legal_grids(job)
        faults = job_faults(job_values(job) | values_on(job, layout))
        assert count(layout) == own + len(faults)
        seen.add(len(faults))
    assert len(seen) > 5


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), max_ranks=st.integers(2, 8))
def test_layouts_are_legal_distinct_and_within_bounds(seed, count, max_ranks):
    layouts = draw_layouts(JOB, own=OWN, count=count, max_ranks=max_ranks, seed=seed)
    assert len(set(layouts)) == len(layouts) == count
    assert all(is_legal(JOB, layout) and 2 <= layout.world_size <= max_ranks for layout in layouts)


@pytest.mark.wide
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_three_layouts_meet_every_axis_eight_every_pair_and_sixteen_every_schedule(seed):
    assert _met(draw_layouts(JOB, own=OWN, count=3, max_ranks=8, seed=seed)) >= AXES
    met = _met(draw_layouts(JOB, own=OWN, count=8, max_ranks=8, seed=seed))
    assert ("uneven", "dp") in met
    assert {("pair", *pair) for pair in combinations(sorted(DEGREES), 2)} <= met
    assert len({feature for feature in met if feature[0] == "micro"}) >= 3
    met = _met(draw_layouts(JOB, own=OWN, count=16, max_ranks=8, seed=seed))
    assert met >= {("schedule", name) for name in SCHEDULES_OF_JOBS}


def test_same_seed_draws_the_same_and_another_seed_others():
    first, again, other = (
        draw_layouts(JOB, own=OWN, count=6, max_ranks=8, seed=s) for s in (1, 1, 2)
    )
    assert first == again and first != other


def test_jobs_own_layout_comes_first_when_it_fits():
    job = make_job("parallel.tp=4", "parallel.pp=1", "schedule.name=gpipe")
    assert draw_layouts(job, own=layout_of(job), count=1, max_ranks=8, seed=0) == (layout_of(job),)
    assert draw_layouts(job, own=layout_of(job), count=4, max_ranks=2, seed=0)[0].world_size == 2


def test_illegal_degrees_are_not_drawn():
    shapes = list(legal_shapes(JOB, 8))
    assert {shape.tp for shape in shapes} == {1, 2, 4, 8}, "there are 8 heads"
    assert {shape.pp for shape in shapes} == {1, 2, 3, 4}, "there are 4 layers"
    assert {shape.dp for shape in shapes} == set(range(1, 9))
    assert {shape.cp for shape in shapes} == {1, 2, 4, 8}, "2 * cp divides 32 tokens"


def test_no_more_data_parallel_ranks_than_samples():
    job = make_job("data.global_batch_size=3")
    assert max(shape.dp for shape in legal_shapes(job, 8)) == 3


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp"])
def test_job_with_layout_has_that_layout(order):
    layout = Layout(
        tp=2, pp=2, schedule="1f1b", micro_batch_size=3, order=order, sequence_parallel=True,
        recompute="selective", recompute_parts=("norm",),
    )  # fmt: skip
    assert layout_of(with_layout(JOB, layout)) == layout
    assert layout_of(make_job(*layout.overrides())) == layout


def test_reference_is_one_rank_with_one_micro_batch():
    reference = reference_layout(JOB)
    assert reference.world_size == 1 and reference.micro_batch_size == JOB.data.global_batch_size


def test_fourteen_layouts_meet_every_option_at_its_simplest_and_otherwise():
    met = _met(draw_layouts(JOB, own=OWN, count=14, max_ranks=8, seed=0))
    for option in OPTIONS:
        values = {feature for feature in met if feature[0] == option.name}
        # Documents must be packed for the one, and 8 ranks be on cp alone for the other.
        assert len(values) >= 2 or option.name in ELSEWHERE, option.name


def test_dynamic_cp_is_drawn_where_documents_are_packed():
    job = make_job("data.packing=best_fit", "data.document_multiple=8")
    met = _met(draw_layouts(job, own=layout_of(job), count=10, max_ranks=8, seed=2))
    assert {value for name, value in _pairs(met) if name == "dynamic_cp"} == {False, True}


@pytest.mark.parametrize("option", ["balance_images", "cuts_vision_tower"])
def test_layouts_of_images_are_drawn_where_a_model_reads_images(option):
    job = make_job(file="llava.yaml")
    met = _met(draw_layouts(job, own=layout_of(job), count=10, max_ranks=8, seed=2))
    assert {value for name, value in _pairs(met) if name == option} == {False, True}


def test_a_cut_tower_is_in_the_job_of_its_layout():
    job = make_job(file="llava.yaml")
    layout = Layout(tp=2, cuts_vision_tower=True)
    cut = with_layout(job, layout)
    assert cut.model.vision.tensor_parallel and not job.model.vision.tensor_parallel
    assert layout_of(cut) == layout
    assert layout_of(make_job(*layout.overrides(), file="llava.yaml")) == layout


def test_placements_are_drawn_even_by_cost_uneven_and_with_empty_stages():
    drawn = draw_layouts(JOB, own=OWN, count=24, max_ranks=8, seed=1)
    kinds = {value for name, value in _pairs(_met(drawn)) if name == "stages"}
    assert kinds == {"even", "auto", "uneven", "empty"}
    for layout in drawn:
        stages = with_layout(JOB, layout).parallel.stages
        assert stages == layout.stages
        if stages not in ("even", "auto"):
            assert stages.count("|") == layout.num_stages - 1 and layout.num_stages > 1


def _pairs(met):
    return {feature for feature in met if len(feature) == 2}


def test_stages_of_the_jobs_own_are_tried_where_the_depth_is_kept():
    job = make_job("parallel.stages=Ettt|tL")
    own = layout_of(job)
    free = make_job()
    assert draw_layouts(free, own=own, count=1, max_ranks=8, seed=0) == (own,)
    deeper = make_job("model.num_layers=6")
    assert draw_layouts(deeper, own=own, count=1, max_ranks=8, seed=0)[0].stages == "even"


@pytest.mark.parametrize(
    "words",
    [
        (
            "schedule.name=interleaved",
            "schedule.chunks=2",
            "schedule.microbatch_group_size_per_vp_stage=3",
        ),
        (
            "schedule.name=zb_auto",
            "schedule.max_in_flight_microbatches=3",
            "schedule.wgrad_activation_fraction=0.25",
        ),
    ],
)
def test_settings_of_the_jobs_own_schedule_are_tried_on_its_own_grid(words):
    job = make_job(*words)
    small = shrink_job(job, steps=3, max_params=10**6, max_ranks=8, is_data_there=True)
    assert not [change for change in small.changes if change.field.startswith("schedule")]
    own = layout_of(job)
    assert own.microbatch_group_size_per_vp_stage == 3 or (
        own.max_in_flight_microbatches,
        own.wgrad_activation_fraction,
    ) == (3, 0.25)
    assert draw_layouts(small.job, own=own, count=1, max_ranks=8, seed=0) == (own,)


def test_settings_go_with_the_schedule_and_the_stages_that_read_them():
    grouped = Layout(pp=2, schedule="interleaved", chunks=2, microbatch_group_size_per_vp_stage=4)
    assert (
        is_legal(JOB, grouped)
        and grouped.with_value("schedule", "gpipe").microbatch_group_size_per_vp_stage == "pp"
    )
    assert grouped.with_value("pp", 1).microbatch_group_size_per_vp_stage == "pp"
    by_hand = Layout(pp=2, first_stage_layers=1, is_loss_a_layer=True)
    assert is_legal(JOB, by_hand)
    assert by_hand.with_value("stages", "auto") == Layout(pp=2, stages="auto")
    assert by_hand.with_value("chunks", 2) == Layout(pp=2, chunks=2, is_loss_a_layer=True)


def test_text_goes_with_the_stages_that_it_was_written_for():
    layout = Layout(pp=2, stages="Ettt|tL")
    assert layout.with_value("dp", 2).stages == "Ettt|tL"
    assert layout.with_value("pp", 1).stages == layout.with_value("chunks", 2).stages == "even"


def test_placement_by_hand_does_not_keep_other_placements_away():
    job = make_job("parallel.is_loss_a_layer=true")
    assert is_legal(job, Layout(pp=2, stages="auto")) and is_legal(job, Layout(pp=2))


def test_option_that_changes_nothing_is_left_at_its_simplest():
    for layout in draw_layouts(JOB, own=OWN, count=30, max_ranks=8, seed=3):
        assert layout.tp > 1 or not layout.sequence_parallel
        assert layout.dp * layout.cp > 1 or layout.sharding == "none"
        assert layout.cp > 1 or layout.cp_method == "ring"


@pytest.mark.wide
def test_hybrid_is_drawn_with_every_number_of_neighbours_that_fits():
    few = ("data.global_batch_size=1", "model.num_layers=1", "parallel.pp=1", "parallel.tp=1")
    job = make_job("model.num_heads=8", "model.num_kv_heads=8", *few)
    drawn = {
        (layout.cp, layout.hierarchical_cp_size)
        for seed in range(30)
        for layout in draw_layouts(job, own=layout_of(job), count=8, max_ranks=8, seed=seed)
        if layout.cp_method == "hybrid"
    }
    assert drawn == {(4, 2), (8, 2), (8, 4)}


def test_what_has_nothing_to_say_on_a_simpler_layout_goes():
    hybrid = Layout(
        cp=8, cp_method="hybrid", hierarchical_cp_size=4, recompute="full", recompute_every=2
    )
    assert hybrid.with_value("cp", 1) == replace(
        hybrid, cp=1, cp_method="ring", hierarchical_cp_size=2
    ) and is_legal(JOB, hybrid.with_value("recompute", "none"))


def test_experts_are_folded_in_every_way_and_micro_batches_stay_where_routing_goes_by_them():
    job = make_job("model.moe.num_experts=4", "model.moe.capacity_factor=1.0")
    layouts = draw_layouts(job, own=layout_of(job), count=8, max_ranks=8, seed=0)
    met = _met(layouts)
    assert {name for name, value, *_ in met if name in ("ep", "etp") and value > 1} == {"ep", "etp"}
    assert {layout.micro_batch_size for layout in layouts} == {job.schedule.micro_batch_size}
    assert reference_layout(job).micro_batch_size == job.schedule.micro_batch_size
    free = make_job("model.moe.num_experts=4")
    assert reference_layout(free).micro_batch_size == free.data.global_batch_size


EXPERTS = ("model.moe.num_experts=4", "model.moe.intermediate_size=16")


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), [("degree", "tp", 4)]),
        (("model.attention_dropout=0.1",), [("cp_method", "all_to_all"), ("axis", "cp"), ("axis", "tp")]),
        (EXPERTS, [("overlap_moe_expert_parallel_comm", True), ("moe_token_dispatcher_type", "all_gather")]),
        (
            ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8"),
            [("dynamic_cp", True), ("cp_method", "all_gather")],
        ),
        (
            ("model.attention={layer_types: [sliding, full], sliding_window: 5, sinks: true}",),
            [("cp_method", method) for method in ("ring", "all_gather", "all_to_all", "hybrid")],
        ),
    ],
    ids=["dense", "attention-dropout", "experts", "packed", "windows"],
)  # fmt: skip
def test_ten_layouts_meet_what_the_jobs_own_features_run_through(overrides, wanted, seed):
    job = make_job(*overrides)
    met = _met(draw_layouts(job, own=layout_of(job), count=10, max_ranks=8, seed=seed))
    assert set(wanted) <= met


def test_what_is_possible_and_was_not_drawn_is_told():
    text = "; ".join(layout_sampling.left_out(JOB, [OWN], max_ranks=4))
    for part in ("tp 2, 4", "cp method", "sharding", "zb_h1", "dp 2, 3, 4"):
        assert part in text
    # no job without experts has these, and no layout of 4 ranks that
    for part in ("; ep", "etp", "overlap moe", "dispatcher", "tp 8"):
        assert part not in text
    more = draw_layouts(JOB, own=OWN, count=6, max_ranks=4, seed=0)
    assert len("; ".join(layout_sampling.left_out(JOB, more, max_ranks=4))) < len(text)


def test_shapes_have_the_options_that_the_job_needs_on_them():
    job = make_job("model.attention_dropout=0.1")
    shapes = {shape for shape in legal_shapes(job, 4) if shape.cp > 1}
    assert shapes and {shape.cp_method for shape in shapes} == {"all_to_all"}
    assert all(is_legal(job, shape) for shape in shapes)


def test_pairs_of_the_jobs_own_features_that_no_layout_has_are_told():
    job = make_job("model.attention_dropout=0.1")
    draw = layout_sampling.draw_layouts(job, own=layout_of(job), count=3, max_ranks=4, seed=0)
    told = layout_sampling.pair_coverage(job, draw.layouts, draw.pairs)
    assert 0 < told.num_drawn < told.num_possible == len(draw.pairs)
    assert any("tp 2 with recompute selective" in text for text in told.own_left_out)
    selective = Layout(tp=2, cp=2, cp_method="all_to_all", recompute="selective")
    added = layout_sampling.pair_coverage(job, [*draw.layouts, selective], draw.pairs)
    assert added.num_drawn > told.num_drawn
    assert not any("tp 2 with recompute selective" in text for text in added.own_left_out)
    # a job without such features has no pairs of its own
    plain = layout_sampling.pair_coverage(JOB, [], draw.pairs)
    assert plain.num_drawn == 0 and plain.own_left_out == ()
