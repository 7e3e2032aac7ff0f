"""Vision towers: counts of a published model, FLOPs and kept bytes as torch counts them, and what is never trained."""

from itertools import accumulate, combinations_with_replacement, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raymega.config.schema import ModelSection, ParallelSection
from raymega.config.vision.section import VisionSection
from raymega.data.samples import open_samples
from raymega.model.vision.tower import VisionTower
from raymega.plan import stages
from raymega.plan.flops import flops_per_token, tower_cost
from raymega.plan.layers.vision import image_elements, image_flops, images_at_once
from raymega.plan.memory.state_bytes import count_parameters
from raymega.plan.run_plan import make_plan
from raymega.plan.stages import layer_counts
from raymega.plan.tensor_table import is_tower_frozen, model_tensors
from raymega.verify.shrink import shrink_job
from tests.support.jobs import make_test_plan
from tests.support.saved_tensor_bytes import SavedBytes
from tests.unit.model.parts import make_model_factory

LLAVA_PARAMETERS = 7_063_427_072
"""Parameters of llava-1.5-7b-hf."""
VISION = VisionSection(
    kind="clip", image_size=28, patch_size=7, num_layers=4, hidden_size=48, num_heads=3, ffn_hidden_size=160,
    image_token_id=9,
)  # fmt: skip
SIGLIP = VISION.model_copy(
    update={"kind": "siglip", "feature_layer": -1, "activation": "gelu_tanh"}
)
SEVERAL = VISION.model_copy(
    update={
        "kind": "qwen2_vl", "feature_layer": -1, "image_size": 0, "patch_size": 7, "spatial_merge_size": 2,
        "max_pixels": 8 * 14**2,
    }
)  # fmt: skip
KINDS = pytest.mark.parametrize(
    "vision", [VISION, SIGLIP, SEVERAL], ids=["clip", "siglip", "several"]
)


def _images(vision, count):
    """Black images of the largest size, and their grids."""
    square = vision.sizes.square
    pixels = torch.zeros((count, vision.num_patches, 3, square, square), dtype=torch.uint8)
    return pixels, torch.tensor([[1, vision.num_patches]] * count)


def _model(vision=VISION, **fields):
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "ffn_hidden_size": 96,
        "vocab_size": 16,
    }
    return ModelSection(family="llama", vision=vision, **sizes | fields)  # fmt: skip


def test_parameters_of_a_published_model():
    vision = VisionSection(
        kind="clip", image_size=336, patch_size=14, num_layers=24, hidden_size=1024, num_heads=16, ffn_hidden_size=4096,
        image_token_id=32000,
    )  # fmt: skip
    model = ModelSection(
        family="llama", num_layers=32, hidden_size=4096, num_heads=32, ffn_hidden_size=11008, vocab_size=32064,
        tie_word_embeddings=False, vision=vision,
    )  # fmt: skip
    assert vision.num_patches == 576
    assert count_parameters(model) == LLAVA_PARAMETERS


@KINDS
def test_flops_of_images_are_those_that_torch_counts(vision):
    model = _model(vision)
    tower = VisionTower(make_model_factory(model, dtype=torch.float32), vision)
    images = _images(vision, 3)
    # the plain formula of attention, whose products the counter sees on a CPU too
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        tower(*images)
    assert counter.get_total_flops() == 3 * image_flops(model)


def test_flops_of_a_token_have_its_share_of_an_image():
    own = _model(VISION.model_copy(update={"image_share": 0.25}))
    text = own.model_copy(update={"vision": VisionSection()})
    more = flops_per_token(own, seq_len=32) - flops_per_token(text, seq_len=32)
    assert more == pytest.approx(3 * 0.25 / 16 * image_flops(own))


@KINDS
def test_kept_numbers_of_an_image_are_near_those_of_the_formula(vision):
    model, images = _model(vision), 5
    tower = VisionTower(make_model_factory(model, dtype=torch.float32), vision)
    given = _images(vision, images)
    with SavedBytes([*tower.parameters(), *given]) as kept:
        tower(*given)
    assert kept.total == pytest.approx(4 * images * image_elements(model), rel=0.1)


def test_images_of_several_sizes_are_counted_by_their_mean_and_worked_on_as_the_largest():
    own = _model(SEVERAL.model_copy(update={"mean_pixels": 2 * 14**2, "image_share": 0.25}))
    assert own.vision.images_per_token == 0.25 / 2
    # four times as many as of the largest, each with the room of one
    largest = _model(SEVERAL.model_copy(update={"image_share": 0.25}))
    parallel = ParallelSection()
    count, fewer = (images_at_once(each, parallel, tokens=1024) for each in (own, largest))
    assert count == 4 * fewer == 128
    assert image_flops(own) == image_flops(largest)
    # the run's own FLOPs are those of the patches that there are
    small = _model(SEVERAL.model_copy(update={"max_pixels": 2 * 14**2, "image_share": 0.25}))
    assert flops_per_token(own, seq_len=32) == flops_per_token(small, seq_len=32)


def test_what_lies_behind_the_projected_block_is_frozen():
    frozen = {each.name for each in model_tensors(_model()) if each.is_frozen}
    assert {name.split(".attention")[0].split(".mlp")[0] for name in frozen} == {
        "vision.layers.3",
        "vision.post_norm.weight",
        "vision.post_norm.bias",
    }
    behind_all = {each.name for each in model_tensors(_model(SIGLIP)) if each.is_frozen}
    assert behind_all == {"vision.post_norm.weight", "vision.post_norm.bias"}


def test_a_frozen_tower_needs_no_backward_and_its_projector_may_be_trained():
    tuned = _model(freeze=("vision.*",), train=("vision.projector.*",))
    assert is_tower_frozen(tuned) and not is_tower_frozen(_model())
    trained = [each.name for each in model_tensors(tuned) if each.is_trained]
    assert [name for name in trained if "vision" in name] == [
        f"vision.projector.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")
    ]
    adapted = _model(lora={"r": 2})
    assert is_tower_frozen(adapted)
    names = [each.name for each in model_tensors(adapted) if each.is_trained]
    assert not any(name.startswith("vision.") for name in names)


def test_ranks_of_a_stage_share_the_images_and_each_has_one():
    model = _model(VISION.model_copy(update={"image_share": 0.5}))
    assert images_at_once(model, ParallelSection(tp=2, cp=2), tokens=1024) == 8
    assert images_at_once(model, ParallelSection(tp=8), tokens=32) == 1


def test_a_step_waits_for_the_dp_rank_with_the_most_images_unless_they_are_balanced():
    model = _model(VISION.model_copy(update={"image_share": 0.5}))
    random = np.random.default_rng(0)
    for dp in (2, 8, 64):
        predicted = images_at_once(model, ParallelSection(dp=dp), tokens=1024)
        drawn = random.poisson(32, (4000, dp)).max(1).mean()
        assert predicted == pytest.approx(drawn, rel=0.1)
        even = images_at_once(model, ParallelSection(dp=dp, balance_images=True), tokens=1024)
        assert even == 32


def test_a_small_job_keeps_the_parts_of_its_tower():
    plan = make_test_plan(
        "model.vocab_size=4096",
        "data.seq_len=1024",
        "model.max_positions=1024",
        "data.packing=best_fit",
        "model.vision={kind: clip, image_size: 224, patch_size: 14, num_layers: 12, hidden_size: 128, num_heads: 4, "
        "ffn_hidden_size: 512, image_token_id: 4000}",
    )
    small = shrink_job(plan.job, steps=2, max_params=100_000, max_ranks=4, is_data_there=False).job
    vision = small.model.vision
    assert (vision.num_patches, vision.num_layers, vision.used_layers) == (4, 3, 2)
    assert vision.image_token_id < small.model.vocab_size
    assert 3 * vision.num_patches < small.data.seq_len


def test_a_shrunk_tower_of_few_narrow_heads_is_one_that_a_job_may_have():
    plan = make_test_plan(
        "data.seq_len=16", "model.vision={kind: qwen2_vl, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 12, "
        "num_heads: 3, ffn_hidden_size: 8, image_token_id: 200, feature_layer: -1}",
    )  # fmt: skip
    small = shrink_job(plan.job, steps=2, max_params=100_000, max_ranks=4, is_data_there=False).job
    assert (small.model.vision.num_heads, small.model.vision.hidden_size) == (2, 8)
    make_plan(small)


def test_a_small_job_keeps_its_several_sizes():
    plan = make_test_plan(
        "model.vocab_size=4096", "data.seq_len=1024", "model.max_positions=1024", "data.packing=best_fit",
        "model.vision={kind: qwen2_vl, max_pixels: 200704, min_pixels: 3136, mean_pixels: 50176, patch_size: 14, "
        "spatial_merge_size: 2, num_layers: 2, hidden_size: 64, num_heads: 2, ffn_hidden_size: 64, feature_layer: -1, "
        "image_token_id: 4000}",
    )  # fmt: skip
    small = shrink_job(plan.job, steps=2, max_params=100_000, max_ranks=4, is_data_there=False).job
    vision = small.model.vision
    assert (vision.image_size, vision.num_patches, vision.min_pixels, vision.mean_pixels) == (
        0,
        4,
        0,
        0,
    )
    rows = open_samples(small)
    grids = {image.grid for sample in range(40) for image in rows.row(sample).images}
    assert len(grids) > 4


def test_auto_moves_blocks_away_from_the_tower():
    model = _model(VISION.model_copy(update={"image_share": 0.5}), num_layers=12)
    # FLOPs that torch would count: the tower's on a token's share of images, over those of a block's products
    block = 2 * sum(
        each.num_elements
        for each in model_tensors(model)
        if each.name.startswith("layers.0.") and len(each.shape) > 1
    )
    cost = tower_cost(model)
    assert cost == pytest.approx(0.5 / 16 * image_flops(model) / block)
    parallel = ParallelSection(stages="auto")

    def counts(tower):
        return layer_counts(parallel, num_layers=12, num_stages=3, loss_cost=1.0, tower_cost=tower)

    assert counts(0.0) == (4, 4, 4) and counts(2.0) == (3, 5, 4)
    assert counts(100.0) == (1, 6, 5), "the others share the rest"
    frozen = _model(VISION, freeze=("vision.*",), num_layers=12)
    assert tower_cost(frozen) == pytest.approx(tower_cost(_model(VISION, num_layers=12)) / 3)
    assert tower_cost(model.model_copy(update={"vision": VisionSection()})) == 0.0


@given(
    costs=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=7),
    num_stages=st.integers(2, 4),
    loss=st.floats(0.0, 3.0),
    tower=st.floats(0.01, 6.0),
)
def test_no_other_split_beside_a_tower_has_a_cheaper_dearest_stage(costs, num_stages, loss, tower):
    def dearest(cuts):
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[begin:end]) for begin, end in pairwise(ends)]
        return max(sums[0] + tower, *sums[1:-1], sums[-1] + loss)

    counts = layer_counts(
        ParallelSection(stages="auto"), num_layers=len(costs), num_stages=num_stages, loss_cost=loss, costs=costs,
        tower_cost=tower,
    )  # fmt: skip
    assert sum(counts) == len(costs) and counts[0] >= 1
    places = combinations_with_replacement(range(1, len(costs) + 1), num_stages - 1)
    assert dearest([*accumulate(counts[:-1])]) <= min(map(dearest, places)) + 1e-9


def test_a_deep_model_beside_a_tower_is_split_without_trying_each_count():
    tried = []
    original = stages._cheapest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_cheapest", lambda *args: tried.append(args) or original(*args))
        counts = layer_counts(
            ParallelSection(stages="auto"), num_layers=4096, num_stages=64, loss_cost=1.0, tower_cost=2.5
        )  # fmt: skip
    assert sum(counts) == 4096 and len(tried) < 20
