"""Vision tower in low precision, and positions of rows that begin inside an image."""

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
    pixels = levels.repeat(2)[:432].reshape(1, 3, 12, 12)
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
    axes = image_axes(places, (SEQ_LEN,), VISION.edge)
    assert int(axes.max()) == SEQ_LEN + VISION.edge - 2 >= MODEL.max_positions
    rope = Rope(MODEL, dtype=torch.float64, device=CPU)
    cos, _ = rope.rotations(axes[0][:, None])
    assert cos.shape[0] == SEQ_LEN
    assert len(rope.cos) == MODEL.num_rope_positions == int(axes.max()) + 1
