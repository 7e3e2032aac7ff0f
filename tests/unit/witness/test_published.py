"""Published tables and optional packages as witnesses: muP's table 8 and its authors' code, 8-bit states."""

import pytest
import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.param_groups import rates_of
from raymega.optim.state_formats import dynamic_codes
from raymega.plan.memory.quantized_blocks import BLOCK
from raymega.plan.tensor_table import model_tensors
from tests.support.params import make_optimizer, make_param, make_tensor
from tests.support.references.plain_models import make_model

RATIO = 4


def _wide(**changes):
    model = make_model("llama", tie_word_embeddings=False, **changes)
    return model.model_copy(update={"mup_base_width": model.hidden_size // RATIO})


def _kind(tensor):
    """Table 8's columns: input weights and all vectors, output weights, hidden weights."""
    if tensor.name.startswith("head"):
        return "output"
    return (
        "hidden" if len(tensor.shape) == 2 and not tensor.name.startswith("embedding") else "input"
    )


TABLE_8 = {
    "adamw": {"input": 1.0, "output": 1.0, "hidden": 1 / RATIO},
    "sgd": {"input": RATIO, "output": RATIO, "hidden": 1.0},
}
"""Learning rates over those of the base model (Yang and Hu et al. 2022, table 8)."""


@pytest.mark.parametrize("name", TABLE_8)
def test_rates_and_first_values_are_those_of_mup_s_table(name):
    base, wide, section = (
        make_model("llama", tie_word_embeddings=False),
        _wide(),
        OptimizerSection(name=name, lr=1.0),
    )
    for a, b in zip(model_tensors(base), model_tensors(wide), strict=True):
        assert rates_of(b, section, wide).lr_scale == TABLE_8[name][_kind(b)], b.name
        # variance 1 / fan_in of hidden weights; input and output weights as those of the base model
        falls = RATIO if _kind(b) == "hidden" else 1
        assert a.initializer_range**2 == pytest.approx(falls * b.initializer_range**2), b.name


@pytest.mark.wide
@pytest.mark.parametrize("name", TABLE_8)
def test_rates_are_those_of_mup_s_authors(name):
    """Their package groups a small module's parameters by how many of their dims grow."""
    mup = pytest.importorskip(
        "mup", reason="mup is not installed: pip install --no-deps mup==1.0.0"
    )

    class Model(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, width)
            self.norm = torch.nn.LayerNorm(width)
            self.hidden = torch.nn.Linear(width, 2 * width, bias=False)
            self.head = mup.MuReadout(width, 11, bias=False)

    model = mup.set_base_shapes(
        Model(32), Model(32 // RATIO), delta=Model(64), rescale_params=False
    )
    make = {"adamw": mup.MuAdamW, "sgd": mup.MuSGD}[name]
    rates = {
        id(p): g["lr"] for g in make(model.parameters(), lr=1.0).param_groups for p in g["params"]
    }
    found = {
        part: rates[id(getattr(model, part).weight)]
        for part in ("embedding", "norm", "hidden", "head")
    }
    tensors = {
        "embedding": "embedding.tokens",
        "norm": "final_norm",
        "hidden": "layers.0.mlp.down",
        "head": "head",
    }
    own = {
        t.name: rates_of(t, OptimizerSection(name=name, lr=1.0), _wide())
        for t in model_tensors(_wide())
    }
    assert {part: own[f"{full}.weight"].lr_scale for part, full in tensors.items()} == found


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_dettmers_dynamic_type(is_signed):
    """8-bit optimizers, section 2.2: a sign, zeros for the power of ten, an end bit, a linear fraction.

    For squares, which have no sign, that bit is one more of the fraction. Written out from the bits.
    """
    wanted = {0.0, 1.0}
    for zeros in range(7):
        bits = (6 if is_signed else 7) - zeros
        for fraction in range(2**bits):
            value = 10.0**-zeros * (0.1 + 0.9 * (fraction + 0.5) / 2**bits)
            wanted |= {value, -value} if is_signed else {value}
    found = dynamic_codes(is_signed=is_signed)
    torch.testing.assert_close(found, torch.tensor(sorted(wanted)).double(), rtol=1e-6, atol=0)
    # the first two numbers of bitsandbytes' table
    if is_signed:
        assert found[:2].tolist() == pytest.approx([-0.9929687500, -0.9789062500], rel=1e-9)


@pytest.mark.wide
def test_rounded_state_is_torchao_s():
    """Codes and scales of its 8-bit optimizers, which take them from bitsandbytes, on the same moments."""
    theirs = pytest.importorskip(
        "torchao.optim.quant_utils",
        reason="torchao is not installed: pip install --no-deps torchao",
    )
    for is_signed in (True, False):
        table = torch.tensor(theirs.create_dynamic_map(is_signed)).double()
        torch.testing.assert_close(dynamic_codes(is_signed=is_signed), table, rtol=1e-6, atol=1e-12)
    shape = (6, 2 * BLOCK)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    gradient *= torch.logspace(-5, 0, 6)[:, None]
    param = make_param(make_tensor("w", shape))
    section = OptimizerSection(lr=1e-2, state_dtype="8bit")
    buffer, _, optimizer = make_optimizer([param], section)
    buffer.view(param).copy_(gradient)
    optimizer.step(lr=1e-2, step=1)
    found = {block.kind: block.values for block in optimizer.values()}
    moments = {
        "adam.exp_avg": ((1 - section.beta1) * gradient, True),
        "adam.exp_avg_sq": ((1 - section.beta2) * gradient.square(), False),
    }
    for kind, (exact, is_signed) in moments.items():
        table = dynamic_codes(is_signed=is_signed)
        scaled, scale = theirs.scale_tensor(exact.flatten(), BLOCK)
        wanted = theirs.dequant_with_qmap(
            theirs.quantize_8bit_with_qmap(scaled, table), table, scale
        )
        if not is_signed:  # a square that is not zero stays so: ours alone
            wanted = torch.where(
                (wanted == 0) & (exact.flatten() > 0),
                table[1] * scale.repeat_interleave(BLOCK),
                wanted,
            )
        torch.testing.assert_close(found[kind].flatten(), wanted, rtol=1e-6, atol=0)
