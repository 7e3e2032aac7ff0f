"""RoPE: the rotate-half convention, relative positions, angles in fp32 or better."""

import pytest
import torch

from raymega.model.attention.rope import Rope, score_scale
from tests.support.references import plain_models
from tests.support.tolerances import BFLOAT16_ROUNDING, FLOAT64_LAYER
from tests.unit.model.parts import CPU


def _rope(dtype=torch.float64, **changes):
    model = plain_models.make_model("llama", **changes)
    return Rope(model, dtype=dtype, device=CPU), model


def test_rope_is_a_product_of_complex_numbers():
    rope, model = _rope()
    x = torch.randn(7, 3, 5, model.head_width).double()
    wanted = plain_models.rotate(model, x.transpose(0, 1)).transpose(0, 1)
    assert plain_models.difference(rope(x), wanted) < FLOAT64_LAYER


def test_rope_has_known_values():
    """Position 1, one pair: (1, 0) turns by one radian."""
    rope, _ = _rope(hidden_size=8, num_heads=4)
    x = torch.tensor([1.0, 0.0]).double().expand(2, 1, 1, 2)
    assert torch.equal(rope(x)[0], x[0])
    assert rope(x)[1].flatten().tolist() == pytest.approx([0.5403023058681398, 0.8414709848078965])


def test_products_depend_on_the_distance_only():
    rope, model = _rope()
    q, k = torch.randn(2, 1, 1, 1, model.head_width).double().expand(-1, 16, -1, -1, -1)
    scores = torch.einsum("sbhk,tbhk->st", rope(q), rope(k))
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        assert plain_models.difference(diagonal, diagonal[:1].expand_as(diagonal)) < FLOAT64_LAYER


def test_far_positions_keep_their_angle_in_bfloat16():
    rope, model = _rope(torch.bfloat16, max_positions=4096)
    x = torch.randn(4096, 1, 1, model.head_width).to(torch.bfloat16)
    wanted = plain_models.rotate(model, x.double().transpose(0, 1)).transpose(0, 1)
    assert rope(x).dtype == torch.bfloat16
    assert plain_models.difference(rope(x), wanted) < BFLOAT16_ROUNDING


def test_rope_adds_nothing_to_the_state():
    assert _rope()[0].state_dict() == {}


SCALED = {
    "rope_scaling": "llama3",
    "rope_original_positions": 64,
    "rope_theta": 500.0,
    "head_dim": 16,
    "max_positions": 256,
}


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    rope, model = _rope(**SCALED)
    x = torch.randn(256, 2, 3, model.head_width).double()
    wanted = plain_models.rotate(model, x.transpose(0, 1)).transpose(0, 1)
    assert plain_models.difference(rope(x), wanted) < FLOAT64_LAYER
    plain, _ = _rope(**{**SCALED, "rope_scaling": "none"})
    share = (rope.cos[1].arccos() / plain.cos[1].arccos()).flatten()
    assert share[0] == pytest.approx(1.0) and share[-1] == pytest.approx(1 / model.rope_factor)
    assert any(0.2 < float(value) < 0.9 for value in share), "some waves are stretched in part"


def test_yarn_scales_as_its_papers_say():
    """Turned features by sqrt(1/t) = 0.1 ln(s) + 1 (Peng et al. 2023, equation 22); s=40 is DeepSeek's."""
    yarn = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_mscale_all_dim": 0.0}
    rope, model = _rope(**SCALED | yarn)
    lengths = (rope.cos.square() + rope.sin.square()).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 1.3688879454113936))
    assert score_scale(model) == 1.0
    # DeepSeek-V2 scales all features' scores, and with equal weights turned ones by nothing more
    rope, model = _rope(**SCALED | yarn | {"rope_mscale_all_dim": 1.0})
    assert score_scale(model) == pytest.approx(1.3688879454113936**2)
    torch.testing.assert_close(rope.cos.square() + rope.sin.square(), torch.ones_like(rope.cos))


@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_has_the_angles_and_the_scale_of_transformers(factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=int(64 * factor),
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    speeds, scale = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    rope, _ = _rope(
        **SCALED | {"rope_scaling": "yarn", "rope_factor": factor, "rope_mscale_all_dim": 0.0}
    )
    angles = torch.atan2(rope.sin[1], rope.cos[1]).flatten()
    torch.testing.assert_close(angles, speeds.double(), rtol=1e-6, atol=0)
    lengths = torch.hypot(rope.sin, rope.cos)
    torch.testing.assert_close(lengths, torch.full_like(lengths, scale), rtol=1e-12, atol=0)
