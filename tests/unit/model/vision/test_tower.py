"""Vision tower in low precision, and positions of rows that begin inside an image."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection
from raymega.model.attention.rope import Rope
from raymega.model.vision.tower import VisionTower
from raymega.parallel.context_parallel.images import image_axes
from tests.unit.model.parts import CPU, make_model_factory

SEQ_LEN = 16
VISION = VisionSection(
    kind="qwen2_vl", image_size=12, patch_size=4, num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=8,
    feature_layer=-1, mrope_section=(2, 1, 1), image_token_id=9,
)  # fmt: skip
MODEL = ModelSection(
    family="qwen2", num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=8, vocab_size=16, max_positions=SEQ_LEN,
    vision=VISION,
)  # fmt: skip


def test_pixels_are_normalised_before_they_are_rounded():
    levels = torch.arange(256, dtype=torch.uint8)
    pixels = levels.repeat(2)[:432].reshape(1, 9, 3, 4, 4)
    wide, narrow = (
        VisionTower(make_model_factory(MODEL, dtype=dtype), VISION)._cut(pixels)
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert narrow.dtype == torch.bfloat16
    # half of the last of eight bits, and the step of float32 before it
    assert ((narrow.double() - wide).abs() <= wide.abs() * 2**-8 + 1e-6).all()


def test_a_row_that_begins_with_the_last_patch_of_an_image_has_a_place_in_the_table():
    # the longest way: one patch, whose image moves the text behind it by a whole edge
    places = torch.tensor([VISION.num_patches - 1] + [-1] * (SEQ_LEN - 1))
    axes = image_axes(places, (SEQ_LEN,), torch.tensor([[3, 3]]), VISION.num_patches)
    assert int(axes.max()) == SEQ_LEN + VISION.mrope_edge - 2 >= MODEL.max_positions
    rope = Rope(MODEL, dtype=torch.float64, device=CPU)
    cos, _ = rope.rotations(axes[0][:, None])
    assert cos.shape[0] == SEQ_LEN
    assert len(rope.cos) == MODEL.num_rope_positions == int(axes.max()) + 1


def test_the_table_has_a_place_for_the_longest_image_of_several_sizes():
    several = VISION.model_copy(update={"image_size": 0, "max_pixels": 9 * 16})
    assert (several.num_patches, several.mrope_edge) == (9, 9), "it may be one token high"
    places = torch.tensor([8] + [-1] * (SEQ_LEN - 1))
    axes = image_axes(places, (SEQ_LEN,), torch.tensor([[1, 9]]), 9)
    rows = MODEL.model_copy(update={"vision": several}).num_rope_positions
    assert rows == int(axes.max()) + 1


@pytest.mark.parametrize("grids", [[(2, 3), (1, 4), (3, 1)], [(1, 1), (4, 2)], []])
def test_positions_of_images_of_several_sizes_are_those_of_transformers(grids):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel as Model

    # two tokens of text before each image, and three behind the last
    places, most = [], 8
    for number, (rows, columns) in enumerate(grids):
        places += [-1, -1, *(number * most + at for at in range(rows * columns))]
    places = torch.tensor([*places, -1, -1, -1])
    own = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=partial(Model.get_vision_position_ids, None),
    )
    sizes = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])
    kinds = (places >= 0).int()[None]
    wanted, _ = Model.get_rope_index(own, torch.ones_like(kinds).long(), kinds, sizes)
    given = torch.tensor(grids, dtype=torch.int64).view(-1, 2)
    assert torch.equal(image_axes(places, (len(places),), given, most), wanted[:, 0])


def test_what_lies_behind_an_image_on_its_canvas_changes_no_feature():
    several = VISION.model_copy(
        update={"image_size": 0, "max_pixels": 6 * 64, "spatial_merge_size": 2}
    )
    model = MODEL.model_copy(update={"vision": several})
    tower = VisionTower(make_model_factory(model, dtype=torch.float64), several)
    generator = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.data.normal_(generator=generator)
    pixels = torch.randint(256, (2, 6, 3, 8, 8), generator=generator, dtype=torch.uint8)
    grids = torch.tensor([[2, 2], [3, 1]])
    found = tower(pixels, grids).view(2, 6, -1)
    for at, (rows, columns) in enumerate(grids.tolist()):
        alone = tower(pixels[at : at + 1, : rows * columns], grids[at : at + 1])
        assert torch.allclose(found[at, : rows * columns], alone, rtol=1e-12, atol=1e-12)
    # the same squares in another shape are another image
    turned = tower(pixels[:1, :4], torch.tensor([[1, 4]]))
    assert not torch.allclose(found[0, :4], turned, rtol=1e-3, atol=1e-3)
