"""Learning rate and decay by role and layer; every tensor of a model has the role that it should."""

import pytest

from raymega.config.schema import OptimizerSection
from raymega.optim.param_groups import Rates, rates_of, role_rates
from raymega.plan.tensor_table import model_tensors
from tests.support.params import MODEL, make_tensor
from tests.support.references.plain_models import make_model
from tests.unit.plan.layers.test_vision import VISION

SECTION = OptimizerSection(lr=0.5, weight_decay=0.1, embedding_lr=1.0, head_lr=1.5, norm_lr=2.0)
RATES = {
    "embedding": Rates(lr_scale=2.0, weight_decay=0.1),
    "head": Rates(lr_scale=3.0, weight_decay=0.1),
    "matrix": Rates(lr_scale=1.0, weight_decay=0.1),
    "norm": Rates(lr_scale=4.0, weight_decay=0.0),
    "bias": Rates(lr_scale=4.0, weight_decay=0.0),
}


def _rates(role, section, model=MODEL):
    return rates_of(make_tensor(role, (4, 4), role=role), section, model)


@pytest.mark.parametrize("role", RATES)
def test_role_has_its_rates(role):
    assert _rates(role, SECTION) == RATES[role]


def test_rates_of_their_own_do_not_follow_lr():
    for role in ("embedding", "head", "norm"):
        doubled = SECTION.model_copy(update={"lr": 1.0})
        assert 1.0 * _rates(role, doubled).lr_scale == 0.5 * _rates(role, SECTION).lr_scale


def test_tables_are_not_decayed_when_the_job_says_so():
    section = SECTION.model_copy(update={"is_embedding_decayed": False})
    assert _rates("embedding", section) == Rates(lr_scale=2.0, weight_decay=0.0)
    assert _rates("head", section) == RATES["head"]


def test_rates_decay_from_the_head_down_to_the_tables():
    section = OptimizerSection(lr=1.0, layer_lr_decay=0.5)
    model = make_model("llama", num_layers=3, tie_word_embeddings=False, num_nextn_predict_layers=1)
    scales = {t.name: rates_of(t, section, model).lr_scale for t in model_tensors(model)}
    assert scales["head.weight"] == scales["final_norm.weight"] == 1.0
    assert scales["mtp.0.join.weight"] == scales["mtp.0.attention.q.weight"] == 1.0
    for layer, wanted in enumerate((0.125, 0.25, 0.5)):
        for name in ("attention.q", "attention_norm", "mlp.down"):
            assert scales[f"layers.{layer}.{name}.weight"] == wanted
    assert scales["embedding.tokens.weight"] == 0.125


@pytest.mark.parametrize(("family", "fields"), [("bert", {}), ("llama", {"vision": VISION})])
def test_what_lies_below_the_blocks_has_the_rate_of_the_tables(family, fields):
    section = OptimizerSection(lr=1.0, layer_lr_decay=0.5)
    model = make_model(family, num_layers=3, **fields)
    scales = {t.name: rates_of(t, section, model).lr_scale for t in model_tensors(model)}
    below = {name for name in scales if name.startswith(("embedding.", "vision."))}
    assert {name.rpartition(".")[0] for name in below} & {"embedding.norm", "vision.projector.up"}
    assert {scales[name] for name in below} == {0.125}


def test_rates_by_role_are_told_where_they_differ():
    assert role_rates(OptimizerSection(lr=1.0), MODEL) == {}
    wanted = {"embedding": 2.0, "matrix": 1.0, "norm": 4.0}
    assert role_rates(SECTION, MODEL) == wanted
    below = role_rates(OptimizerSection(lr=1.0, layer_lr_decay=0.5), MODEL)
    assert below == {"embedding": 0.25, "matrix": 0.5, "norm": 0.5}


@pytest.mark.parametrize(
    ("name", "matrix", "other"),
    [("adamw", 0.25, 1.0), ("lion", 0.25, 1.0), ("muon", 0.5, 1.0), ("sgd", 1.0, 4.0)],
)
def test_rates_of_a_wider_model_follow_mup(name, matrix, other):
    section = OptimizerSection(name=name, lr=1.0)
    model = MODEL.model_copy(update={"mup_base_width": MODEL.hidden_size // 4})
    found = {role: _rates(role, section, model).lr_scale for role in RATES}
    assert found.pop("matrix") == matrix and set(found.values()) == {other}


def test_only_matrices_start_smaller_in_a_wider_model():
    plain = make_model("llama", tie_word_embeddings=False, num_nextn_predict_layers=1)
    wide = plain.model_copy(update={"mup_base_width": plain.hidden_size // 4})
    for a, b in zip(model_tensors(plain), model_tensors(wide), strict=True):
        assert (
            a.initializer_range / b.initializer_range == 2
            if a.role == "matrix"
            else a.initializer_range == b.initializer_range
        )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_tensors_have_the_role_that_their_name_tells(family, is_tied):
    for tensor in model_tensors(make_model(family, tie_word_embeddings=is_tied)):
        if "norm" in tensor.name and tensor.name.endswith("weight"):
            wanted = "norm"
        elif tensor.name.endswith("bias"):
            wanted = "bias"
        else:
            wanted = {"embedding": "embedding", "head": "head"}.get(
                tensor.name.split(".")[0], "matrix"
            )
        assert tensor.role == wanted, tensor.name
