"""Whether a run can start with a checkpoint's weights, asked before anything starts."""

import shutil

import pytest

from raymega.api import load_job
from raymega.checkpoint.keys import ROOT
from raymega.checkpoint.start import start_faults
from raymega.config.schema import ModelSection
from raymega.convert.hf_import import hf_import
from raymega.errors import ConfigError
from raymega.storage.open import open_store
from tests.support.jobs import VERIFY
from tests.unit.convert.folders import NOW, make_model, write_folder


@pytest.fixture
def imported(tmp_path):
    folder = write_folder(tmp_path / "theirs", make_model())
    return hf_import(folder, str(tmp_path / "ours"), created=NOW, vocab_multiple=8)


def _changed(model: ModelSection, **changes) -> ModelSection:
    return model.model_copy(update=changes)


def test_same_model_has_no_faults(imported):
    assert start_faults(imported.uri, imported.model) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"num_layers": 3}, "layers.2.attention_norm.weight as nothing instead of (16,)"),
        ({"num_layers": 1}, "layers.1.attention.k.weight, which this model lacks,"),
        ({"ffn_width": 32}, "mlp.gate.weight as (24, 16) instead of (32, 16)"),
        ({"num_heads": 2, "num_kv_heads": 1}, "was made with model.num_heads=4, not 2"),
        ({"vocab_size": 51}, "was made with model.vocab_size=50, not 51"),
    ],
    ids=["deeper", "shallower", "wider", "other heads", "other padding"],
)
def test_other_model_is_refused(imported, change, fact):
    (fault,) = start_faults(imported.uri, _changed(imported.model, **change))
    assert fact in str(fault) and "checkpoint.start_from=" in str(fault)


def test_what_the_weights_do_not_fix_may_change(imported):
    changes = {"residual_dropout": 0.1, "z_loss": 0.1, "max_positions": 24, "rope_base": 5e5}
    assert start_faults(imported.uri, _changed(imported.model, **changes)) == []


def test_missing_files_are_told(imported):
    store = open_store(imported.uri)
    (data,) = [key for key in store.list(ROOT) if key.endswith(".safetensors")]
    store.delete(data)
    (fault,) = start_faults(imported.uri, imported.model)
    assert f"{data} is missing" in str(fault)


def test_job_with_a_start_that_is_none_is_refused_before_it_runs(tmp_path):
    override = f"checkpoint.start_from={tmp_path / 'nothing'}"
    root = f"checkpoint.uri={tmp_path / 'runs'}"
    with pytest.raises(ConfigError, match=r"start_from=.*there is no checkpoint at"):
        load_job(VERIFY, [override, root], is_for_training=True)
    assert not (tmp_path / "runs").exists()


def test_run_with_checkpoints_of_its_own_needs_its_start_no_more(tmp_path, imported):
    """It is resumed from its own, so the source may be gone."""
    root = tmp_path / "runs"
    shutil.copytree(imported.uri, root / "verify")
    overrides = [f"checkpoint.start_from={tmp_path / 'gone'}", f"checkpoint.uri={root}"]
    assert load_job(VERIFY, overrides, is_for_training=True).run.name == "verify"
