"""Encoders without a head: in and out by their own names, with or without a pooler, and no training."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel

from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.heads.section import HeadSection
from raymega.config.schema import CheckpointSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.errors import ConfigError, PlanError
from tests.support.jobs import make_test_plan
from tests.unit.convert.folders import NOW


@pytest.fixture
def folder(tmp_path):
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=40,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def _import(folder):
    return hf_import(folder, str(folder.parent / "ours"), created=NOW)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_weights_come_back_by_their_own_names(folder, is_averaged):
    if is_averaged:  # as sentence-transformers writes it
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    done = _import(folder)
    assert done.model.head.kind == "none"
    assert done.model.head.pooling == ("mean" if is_averaged else "auto")
    hf_export(done.uri, folder.parent / "back")
    whole, back = (load_file(at / "model.safetensors") for at in (folder, folder.parent / "back"))
    left = {name for name in whole if name.startswith("pooler.")} if is_averaged else set()
    assert whole.keys() - back.keys() == left and back.keys() <= whole.keys()
    assert all(torch.equal(values, whole[name]) for name, values in back.items())
    config = json.loads((folder.parent / "back" / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]


@pytest.mark.parametrize(
    ("content", "words"), [("{", "cannot be read"), ("[1]", "holds a list")], ids=["cut", "list"]
)
def test_a_broken_file_of_pooling_is_told(folder, content, words):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        _import(folder)


def test_an_embedding_begins_from_it_without_its_pooler(folder):
    done = _import(folder)
    head = HeadSection(kind="embedding")
    model = done.model.model_copy(update={"head": head})
    (fault,) = start_faults(CheckpointSection(init_from=done.uri), model)
    assert "checkpoint.init_ignore=[head.pooler.bias,head.pooler.weight]" in fault.remedy
    asked = CheckpointSection(init_from=done.uri, init_ignore=("head.pooler.*",))
    assert not start_faults(asked, model)


def test_a_classifier_begins_from_it_and_nothing_trains_without_a_head(folder):
    done = _import(folder)
    assert open_checkpoint(done.uri).manifest.step == 0
    head = done.model.head.model_copy(update={"kind": "sequence_classification"})
    model = done.model.model_copy(update={"head": head})
    asked = CheckpointSection(init_from=done.uri)
    (fault,) = start_faults(asked, model)
    assert "checkpoint.reinit=[head.score.bias,head.score.weight]" in fault.remedy
    assert not start_faults(asked.model_copy(update={"reinit": ("head.score.*",)}), model)
    # its pooler is there too; a mean reads none, which the job says
    mean = model.model_copy(update={"head": head.model_copy(update={"pooling": "mean"})})
    assert start_faults(asked.model_copy(update={"reinit": ("head.score.*",)}), mean)
    with pytest.raises(PlanError, match="states of the last block have no loss"):
        make_test_plan("model.family=bert", "model.num_kv_heads=num_heads", "model.head.kind=none")
