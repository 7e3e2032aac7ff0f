"""Whole runs under every schedule: the same run as one rank's, for any chunks and micro-batches."""

import pytest

from raymega.schedule.table import SCHEDULES
from raymega.verify.layout import OPTIONS
from tests.dist.runs.test_layouts import MODELS, check_same_run
from tests.support.jobs import layout_overrides

pytestmark = pytest.mark.dist

NAMES = next(option for option in OPTIONS if option.name == "schedule").values
CHUNKS = [
    (name, chunks)
    for name in NAMES
    for chunks in range(SCHEDULES[name].least_chunks, min(2, SCHEDULES[name].most_chunks) + 1)
]


def _options(name, chunks, micro_batch_size):
    return [
        f"schedule.name={name}",
        f"schedule.chunks={chunks}",
        f"schedule.micro_batch_size={micro_batch_size}",
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_schedule_trains_the_same_run(name, chunks, pp):
    """Of 16 sequences: 8 micro-batches, or 6 with masked slots on 4 ranks."""
    size = {2: 2, 4: 3}[pp]
    model = "llama-8-layers"
    overrides = [*MODELS[model], *layout_overrides(f"pp{pp}"), *_options(name, chunks, size)]
    check_same_run(overrides, model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [16, 6, 1])
@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipe_v"])
def test_one_three_and_many_micro_batches(name, size):
    check_same_run(
        [*layout_overrides("pp2"), *_options(name, 2, size)],
        "llama-gqa-tied",
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["gpt2-tied", "gpt2-untied", "llama-gqa-tied"])
@pytest.mark.parametrize("layout", ["pp1", "tp2-pp2-sp", "pp2-dp2"])
def test_chunks_keep_tied_and_untied_heads_biases_and_shards_right(model, layout):
    """The table is held once where first and last stage share a rank, and copied where not."""
    for name in ("interleaved", "zb_v"):
        overrides = [*MODELS[model], *layout_overrides(layout), *_options(name, 2, 2)]
        check_same_run([*overrides, "parallel.sharding=optimizer"], model)


def test_put_off_gradients_reach_buckets_that_leave_early():
    for name in ("zb_h1", "zb_auto"):
        overrides = [*layout_overrides("pp2-dp2"), *_options(name, 1, 1)]
        check_same_run([*overrides, "parallel.sharding=optimizer"], "llama-gqa-tied")


def test_many_chunks_and_large_groups():
    overrides = [*layout_overrides("pp2"), *_options("interleaved", 3, 2)]
    check_same_run([*overrides, "schedule.microbatch_group_size_per_vp_stage=3"], "llama-gqa-tied")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "placing"),
    [
        ("gpt2-tied", ["parallel.stages=E|tttt|L", "parallel.pp=3"]),
        ("llama-gqa-tied", ["parallel.stages=Et||tt|tL", "schedule.chunks=2"]),
        ("gpt2-untied", ["parallel.stages=auto", "schedule.name=zb_h2"]),
        ("llama-gqa-tied", ["parallel.first_stage_layers=3"]),
        (
            "llama-gqa-tied",
            ["parallel.stages=Ett||t|tL", "schedule.name=zb_v", "schedule.chunks=2"],
        ),
    ],
    ids=str,
)
def test_layers_placed_by_hand_train_the_same_run(model, placing):
    check_same_run([*MODELS[model], *layout_overrides("pp2"), *placing], model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "memory",
    [
        ["memory.recompute=full", "memory.recompute_every=2"],
        ["memory.recompute=selective", "memory.recompute_parts=[attention, activation, norm]"],
    ],
    ids=["full", "selective"],
)
def test_inputs_that_are_made_again_serve_gradients_that_are_put_off(memory):
    overrides = [*layout_overrides("tp2-pp2-sp"), *_options("zb_v", 2, 2), *memory]
    check_same_run(overrides, "llama-gqa-tied")
