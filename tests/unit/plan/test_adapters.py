"""Tables with adapters and frozen weights: names, shapes, cuts, and what is trained, saved and counted."""

import pytest

from raymega.config.heads.section import HeadSection
from raymega.config.lora import LoraSection
from raymega.plan.adapters import tuned_kind
from raymega.plan.flops import trained_share
from raymega.plan.memory.state_bytes import count_parameters
from raymega.plan.tensor_table import model_tensors, saved_tensors
from tests.unit.convert.folders import make_model

PLAIN = make_model()


def _lora(**fields):
    return make_model(lora=LoraSection(**{"r": 2, **fields}))


def _table(model):
    return {tensor.name: tensor for tensor in model_tensors(model)}


def test_an_adapter_is_cut_as_its_layer_and_alone_is_trained_and_saved():
    table = _table(_lora(target_modules=("attention.*",)))
    a, b = (table[f"layers.1.attention.k.lora_{x}.weight"] for x in "ab")
    assert (a.shape, a.tp_dim, b.shape, b.tp_dim) == ((2, 16), -1, (8, 2), 0)
    assert (a.tp_units, b.tp_units, a.serves_heads, b.serves_heads) == (0, 2, False, True)
    a, b = (table[f"layers.1.attention.out.lora_{x}.weight"] for x in "ab")
    assert (a.shape, a.tp_dim, b.shape, b.tp_dim) == ((2, 16), 1, (16, 2), -1)
    assert (a.init, b.init) == ("normal", "zeros")
    assert a.initializer_range == pytest.approx((1 / 48) ** 0.5)
    trained = {name for name, tensor in table.items() if tensor.is_trained}
    assert trained == {name for name in table if ".lora_" in name}
    assert len(trained) == 2 * 2 * 4
    assert {t.name for t in saved_tensors(_lora(target_modules=("attention.*",)))} == trained


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (("attention.q",), ["layers.0.attention.q", "layers.1.attention.q"]),
        (("layers.1.mlp.down",), ["layers.1.mlp.down"]),
        (("layers.0.attention.[qk]",), ["layers.0.attention.q", "layers.0.attention.k"]),
    ],
)
def test_patterns_choose_layers(targets, wanted):
    found = _table(_lora(target_modules=targets))
    ends = ".lora_a.weight"
    assert [name.removesuffix(ends) for name in found if name.endswith(ends)] == wanted


def test_heads_get_no_adapter():
    # a head for pairs of segments reads single states, which have no keys of dropout
    lora = LoraSection(r=2, target_modules=("*",))
    encoder = {"sentence_loss": "next_sentence"}
    model = make_model("bert", num_kv_heads="num_heads", lora=lora, encoder=encoder)
    adapted = {name for name in _table(model) if ".lora_a." in name}
    assert "layers.1.mlp.up.lora_a.weight" in adapted
    assert not [name for name in adapted if name.startswith("head.")]


def test_freeze_and_train_choose_tensors_and_whole_models_are_saved():
    model = make_model(freeze=("layers.*", "embedding.*"), train=("*norm*",))
    trained = [name for name, tensor in _table(model).items() if tensor.is_trained]
    assert trained == [name for name in _table(PLAIN) if "norm" in name]
    assert len(saved_tensors(model)) == len(model_tensors(PLAIN))
    assert count_parameters(model) == count_parameters(PLAIN)


def test_scales_are_those_of_lora_and_rslora():
    assert LoraSection(r=4, lora_alpha=6.0).scale == 1.5
    assert LoraSection(r=4, lora_alpha=6.0, use_rslora=True).scale == 3.0


def test_weight_gradients_of_frozen_layers_are_not_counted():
    assert trained_share(PLAIN) == 1.0
    assert 0 < trained_share(_lora()) < 0.3
    assert trained_share(make_model(freeze=("layers.0.*",))) == 0.5


def test_layers_that_a_pattern_tells_apart_are_not_alike():
    for pattern in ("layers.1.*", "*.1.*", "*s.[1-3].mlp.*", "*1.mlp.*"):
        model = make_model(freeze=(pattern,))
        assert tuned_kind(model, 0) != tuned_kind(model, 1), pattern
    for pattern in ("*norm*", "layers.*", "*.mlp.*"):
        model = make_model(freeze=(pattern,))
        assert tuned_kind(model, 0) == tuned_kind(model, 1), pattern


def test_a_new_head_is_trained_whole_beside_adapters():
    head = {"kind": "sequence_classification", "num_labels": 3}
    model = _lora(target_modules=("attention.q", "*")).model_copy(
        update={"head": HeadSection(**head)}
    )
    table = _table(model)
    assert table["head.score.weight"].shape == (3, 16)
    assert table["head.score.weight"].is_trained
    assert not any(name.startswith("head.score.lora") for name in table)
    assert "head.score.weight" in {tensor.name for tensor in saved_tensors(model)}
    assert table["layers.0.attention.q.weight"].is_frozen
