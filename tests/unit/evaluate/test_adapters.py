"""Checkpoints of adapters evaluated live: their scores, their base, and what is refused before anything starts."""

import shutil

import numpy as np
import pytest
import torch

from raymega.checkpoint.load.adapted_base import FIELD
from raymega.checkpoint.load.fingerprint import SOURCES, fingerprint_at
from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.load.pinned_source import pin_faults
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.lora import LoraSection
from raymega.config.schema import CheckpointSection
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.tuned.merge import merge, whole_weights
from raymega.errors import ConfigError
from raymega.evaluate.plan import EvalOptions, plan_of
from raymega.evaluate.requests import Request
from raymega.evaluate.worker import score_requests
from raymega.storage.registry import open_store
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support.params import ALONE
from tests.unit.convert.folders import NOW, make_model, write_checkpoint, write_folder

CPU = torch.device("cpu")
LIMIT = 1e-10


def _write(uri, lora, base, *, sources=None, **fields):
    model = make_model(lora=LoraSection(**lora), **fields)
    job = {"precision": {"dtype": "float64"}, SOURCES: sources or {}}
    write_checkpoint(uri, model, base=base, **job)


@pytest.fixture
def places(tmp_path):
    """URIs of a base, and of adapters with dropout and magnitudes for it."""
    write_folder(tmp_path / "theirs", make_model(), dtype="float64")
    base, adapters = str(tmp_path / "base"), str(tmp_path / "adapters")
    hf_import(tmp_path / "theirs", base, created=NOW, make_vocab_size_divisible_by=8)
    _write(adapters, {"r": 2, "lora_alpha": 3.0, "lora_dropout": 0.5, "use_dora": True}, base)
    return base, adapters


def _scores(uri, *overrides):
    checkpoint = open_checkpoint(uri)
    plan = plan_of(checkpoint, EvalOptions(seq_len=12, overrides=overrides))
    scorer = build_scorer(plan, rank=0, groups=ALONE, device=CPU)
    load_weights(scorer, checkpoint, ALONE)
    tokens = np.random.default_rng(0).integers(0, 50, 9)
    request = Request(tokens=tokens, num_targets=8)
    (log_probs,), _ = score_requests(plan, scorer, ALONE, [request], device=CPU)
    return log_probs


def test_live_adapters_score_as_their_merge(places, tmp_path):
    base, adapters = places
    live = _scores(adapters)
    merged = merge([adapters], str(tmp_path / "merged"), created=NOW).uri
    np.testing.assert_allclose(live, _scores(merged), rtol=LIMIT, atol=LIMIT)
    assert np.abs(live - _scores(base)).max() > 0.1


@pytest.mark.parametrize("base_dtype", ["compute", "nf4"])
def test_what_was_trained_whole_beside_adapters_is_scored_too(base_dtype, places, tmp_path):
    base, beside = places[0], str(tmp_path / "beside")
    lora = {"r": 2, "target_modules": ("attention.*",), "base_dtype": base_dtype}
    _write(beside, lora, base, train=("layers.1.mlp.down.weight", "final_norm.*"))
    merged = merge([beside], str(tmp_path / "merged"), created=NOW).uri
    np.testing.assert_allclose(_scores(beside), _scores(merged), rtol=LIMIT, atol=LIMIT)


def test_a_base_that_has_moved_is_refused_until_its_copy_is_named(places, tmp_path):
    base, adapters = places
    before = _scores(adapters)
    shutil.move(base, tmp_path / "copy")
    with pytest.raises(ConfigError, match="the base of") as refused:
        _scores(adapters)
    assert "--set checkpoint.init_from=URI" in str(refused.value)
    copy = str(tmp_path / "copy")
    np.testing.assert_array_equal(_scores(adapters, f"checkpoint.init_from={copy}"), before)


def test_a_base_that_was_overwritten_is_refused_and_a_copy_is_not(places, tmp_path):
    base, adapters = places[0], str(tmp_path / "trained")
    print_of_base = fingerprint_at(base)
    _write(adapters, {"r": 2}, base, sources={FIELD: print_of_base})
    before = _scores(adapters)
    merge([adapters], str(tmp_path / "merged"), created=NOW)
    shutil.copytree(base, tmp_path / "copy")
    # other weights of the same shapes under the same key
    shutil.rmtree(base)
    _write(base, {}, "none")
    other = fingerprint_at(base)
    for use in (_scores, lambda uri: merge([uri], str(tmp_path / "again"), created=NOW)):
        with pytest.raises(ConfigError, match=f"with fingerprint {other}.*with {print_of_base}"):
            use(adapters)
    copy = str(tmp_path / "copy")
    np.testing.assert_array_equal(_scores(adapters, f"{FIELD}={copy}"), before)
    # of a run that starts with them
    model = make_model(lora=LoraSection(r=2))
    section = CheckpointSection(init_from=base, init_adapter=adapters)
    (fault,) = start_faults(section, model)
    assert other in fault.fact and "leave checkpoint.init_adapter out" in fault.remedy
    assert start_faults(section.model_copy(update={"init_from": copy}), model) == []
    # of a run that goes on, and of one that the fingerprint is not known of
    trained = open_store(adapters)
    (fault,) = pin_faults(base, trained, field=FIELD)
    assert "set checkpoint.init_from to a copy" in fault.remedy
    _write(str(tmp_path / "older"), {"r": 2}, base)
    assert [*pin_faults(base, open_store(str(tmp_path / "older")), field=FIELD)] == []


def test_a_combined_adapter_knows_its_base(places, tmp_path):
    base = places[0]
    _write(str(tmp_path / "one"), {"r": 2}, base)
    done = merge(
        [str(tmp_path / "one")], str(tmp_path / "out"), created=NOW, combination_type="cat"
    )
    told = open_checkpoint(done.uri).manifest.job[SOURCES]
    assert told == {FIELD: fingerprint_at(base)}


def test_adapters_without_a_base_or_over_another_model_are_refused(places, tmp_path):
    _write(str(tmp_path / "alone"), {"r": 2}, "none")
    with pytest.raises(ConfigError, match="init_from=none"):
        _scores(str(tmp_path / "alone"))
    _write(str(tmp_path / "wider"), {"r": 2}, places[0], ffn_hidden_size=32)
    with pytest.raises(ConfigError, match="the base has every weight"):
        _scores(str(tmp_path / "wider"))
    # the last of the weights
    _write(str(tmp_path / "untied"), {"r": 2}, places[0], tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"has no head\.weight"):
        _scores(str(tmp_path / "untied"))


def test_whole_weights_are_a_temporary_merge_or_the_checkpoint_itself(places, tmp_path):
    base, adapters = places
    name = "model/layers.1.mlp.down.weight"
    merged = merge([adapters], str(tmp_path / "merged"), created=NOW).uri
    with whole_weights(open_checkpoint(adapters), base) as source:
        found = open_checkpoint(source).read(name)
    np.testing.assert_array_equal(found, open_checkpoint(merged).read(name))
    with whole_weights(open_checkpoint(base), "none") as source:
        assert source.startswith(base)
