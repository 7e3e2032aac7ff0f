"""Classes of exported heads are those that transformers has for the model's type; further blocks are found again."""

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from raymega.config.heads.section import HeadSection
from raymega.convert.huggingface.architectures import OWN_TYPES
from raymega.convert.huggingface.buffers import is_buffer
from raymega.convert.huggingface.config import config_from, model_from
from raymega.convert.huggingface.families.table import HF_FAMILIES
from raymega.convert.huggingface.heads import head_config
from raymega.convert.huggingface.names import hf_tensors, num_further
from raymega.errors import ConfigError
from raymega.plan.layers.family_parts import family_parts
from tests.unit.convert.folders import make_model

CLASSES = {
    "sequence_classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token_classification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
DECODERS = [
    (ours, theirs)
    for ours, theirs in (*OWN_TYPES.items(), ("qwen3_5", "qwen3_5_moe_text"))
    if family_parts(ours).is_causal and not family_parts(ours).is_encoder_decoder
]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("family", "model_type"), DECODERS)
def test_class_of_an_export_is_there(family, model_type, kind):
    model = make_model(family, head=HeadSection(kind=kind, num_labels=3))
    known = CLASSES[kind].get(model_type)
    try:
        name = HF_FAMILIES[model_type].architecture.name
        (name,) = head_config(model, name, {})["architectures"]
    except ConfigError:
        assert known is None
    else:
        assert name == known


@pytest.mark.parametrize("change", [{"architectures": 5}, {"architectures": [5]}, {"num_labels": "x"}, {"id2label": 5}], ids=str)  # fmt: skip
def test_labels_of_another_kind_are_named(change):
    model = make_model("qwen3", head=HeadSection(kind="sequence_classification", num_labels=3))
    config = config_from(model, dtype="float32", carried={})
    with pytest.raises(ConfigError, match=f"has {next(iter(change))}="):
        model_from(config | change)


NAMES = {"0": "NEGATIVE", "1": "POSITIVE"}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("carried", "num_labels", "wanted"),
    [
        (NAMES, 2, ["NEGATIVE", "POSITIVE"]),
        (NAMES, 3, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        (None, 2, ["LABEL_0", "LABEL_1"]),
        ({"1": "a", "2": "b"}, 2, ["LABEL_0", "LABEL_1"]),
    ],
)
def test_names_of_as_many_labels_are_kept(kind, carried, num_labels, wanted):
    model = make_model("llama", head=HeadSection(kind=kind, num_labels=num_labels))
    published = {"id2label": carried, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    config = config_from(model, dtype="float32", carried=published)
    assert config["id2label"] == {str(n): name for n, name in enumerate(wanted)}
    assert config["label2id"] == {name: n for n, name in enumerate(wanted)}


@pytest.mark.parametrize("kind", [*CLASSES, "regression", "reward"])
@pytest.mark.parametrize("carried", ["regression", "multi_label_classification"])
def test_the_kind_of_a_head_is_the_runs_own(kind, carried):
    model = make_model("llama", head=HeadSection(kind=kind))
    config = config_from(model, dtype="float32", carried={"problem_type": carried})
    assert config.get("problem_type") == ("regression" if kind == "regression" else None)
    assert model_from(config).head == model.head


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_next", "nemotron_h"])
def test_further_blocks_of_an_export_are_found_again(family):
    names = [each.name for each in hf_tensors(make_model(family, num_nextn_predict_layers=2))]
    assert num_further(names, 2) == 2


def test_modules_that_transformers_leaves_out_are_no_weights():
    assert is_buffer("mtp.layers.0.mlp.gate.weight")
    assert not any(is_buffer(each.name) for each in hf_tensors(make_model("qwen3_next", num_nextn_predict_layers=1)))  # fmt: skip
