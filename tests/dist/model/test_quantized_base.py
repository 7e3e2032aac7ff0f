"""A frozen base in NF4 blocks: steps of PEFT over a model whose weights went through QLoRA's published arithmetic."""

import numpy as np
import pytest
import torch

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.tuned.adapted_weights import AdaptedWeights, AdapterPart
from raymega.convert.tuned.peft_names import linear_modules
from raymega.plan.adapters import adapter_names
from raymega.plan.tensor_table import model_tensors
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.references.peft_models import adapted
from tests.support.references.plain_training import (
    TRAINING_LIMIT,
    train_plainly,
    train_rank,
    training_plan,
    whole_weights,
)
from tests.support.references.qlora import through_nf4

pytestmark = pytest.mark.dist

CASES = [
    ("llama3", "tp1", ()),
    ("llama3", "tp2-pp2-sp", ()),
    ("llama3", "cp2", ("memory.recompute=full",)),
    ("llama3", "dp3", ("parallel.sharding=parameters", "data.loss_on=assistant")),
    ("qwen3", "tp2-dp2", ("parallel.sharding=optimizer",)),
]


def _quantize(model, section):
    """Replace each linear layer of a block by its weights after quantisation; return their number."""
    modules, count = dict(model.base_model.model.named_modules()), 0
    for theirs, linear in linear_modules(section).items():
        if linear.startswith("layers.") and getattr(modules[theirs], "weight", None) is not None:
            weight = modules[theirs].weight
            if weight.ndim == 2:
                weight.data = torch.from_numpy(through_nf4(weight.detach().numpy())).to(weight)
                count += 1
    return count


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout", "options"), CASES)
def test_steps_are_those_of_peft_over_the_quantized_weights(tmp_path, kind, layout, options):
    model, done = adapted(kind, tmp_path)
    start = f"checkpoint.init_from={done.base}", f"checkpoint.init_adapter={done.uri}"
    plain = training_plan(done.model, "tp1", *start, *(o for o in options if "loss_on" in o))
    coded = training_plan(done.model, layout, *start, *options, "model.lora.base_dtype=nf4")
    results = run_grid(train_rank, coded.grid, coded.to_json())
    # seven matrices a block
    assert _quantize(model, done.model) == 7 * done.model.num_layers
    curve = train_plainly(model, model.base_model.model, plain)
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole, params = whole_weights(results), dict(model.named_parameters())
    for theirs, linear in linear_modules(done.model).items():
        for end, name in zip("AB", adapter_names(linear), strict=True):
            param = params.get(f"base_model.model.{theirs}.lora_{end}.default.weight")
            if param is not None:
                ours = torch.from_numpy(whole[name])
                assert plain_models.difference(ours, param.detach()) < TRAINING_LIMIT, name


def test_a_merge_adds_to_the_weights_that_the_run_computed_with(tmp_path):
    _, done = adapted("llama3", tmp_path)
    lora = done.model.lora.model_copy(update={"base_dtype": "nf4"})
    coded = done.model.model_copy(update={"lora": lora})
    adapters, base = open_checkpoint(done.uri), open_checkpoint(done.base)
    part = AdapterPart(checkpoint=adapters, model=coded, weight=1.0)
    tensors = {tensor.name: tensor for tensor in model_tensors(coded)}
    found = AdaptedWeights([part], "")
    name = "layers.0.attention.q"
    a, b = (adapters.read(f"model/{each}") for each in adapter_names(name))
    source = base.read(f"model/{name}.weight")
    wanted = through_nf4(source) + lora.scale * (b @ a)
    np.testing.assert_allclose(found.of(tensors[f"{name}.weight"]), wanted, atol=1e-12)
    assert np.abs(wanted - source - lora.scale * (b @ a)).max() > 1e-3
    # no adapter, but a matrix of a block; and one that is kept as it is
    up, table = "layers.0.mlp.up.weight", "embedding.tokens.weight"
    np.testing.assert_array_equal(found.of(tensors[up]), through_nf4(base.read(f"model/{up}")))
    kept = base.read(f"model/{table}")
    np.testing.assert_array_equal(found.of(tensors[table])[: len(kept)], kept)
