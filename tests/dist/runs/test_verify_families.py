"""`raymega verify` of a small job of each model family: random layouts train it as one rank does, with every cp method.

    python -m pytest --everything -s -p no:cacheprovider tests/dist/runs/test_verify_families.py [-k gpt_oss]

A line of JSON for each family, with the largest deviation. Its config is transformers' of `hf_models.py`, `hf_encoders.py`
and `hf_t5.py`, in which all parts of a family are in use.
"""

import importlib
import json
from dataclasses import replace

import pytest

from raymega import api
from raymega.config.load import parse_mapping
from raymega.convert.huggingface.config import model_from
from raymega.verify.layout import OPTIONS
from raymega.verify.layout_sampling import BEARS_ON
from raymega.verify.legal_layouts import legal_shapes, legality
from raymega.verify.run import Options
from tests.support.references import hf_encoders, hf_models, hf_t5
from tests.unit.verify.jobs import make_job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3000)]

LAYOUTS, MAX_RANKS = 8, 8
DECODERS = (*hf_models.KINDS, *hf_models.EXPERTS, *hf_models.ALIASES, *hf_models.FAMILIES)
ENCODERS = tuple(kind for kind in hf_encoders.KINDS if "untied" not in kind)
FAMILIES = (*DECODERS, *ENCODERS, *hf_t5.KINDS)


def _job(kind):
    """The job of a small model, with evaluation; verify shrinks nothing of the model."""
    file = "bert.yaml" if kind in ENCODERS else "t5.yaml" if kind in hf_t5.KINDS else "verify.yaml"
    raw = make_job(file=file).model_dump(mode="json")
    raw["model"] = model_from(_config(kind)).model_dump(mode="json")
    raw["run"]["eval_samples"] = 7
    raw["parallel"]["pp"] = 1
    if kind in hf_t5.KINDS:
        raw["model"]["encoder_decoder"]["decoder_seq_len"] = 16
        raw["data"]["span_corruption"]["first_sentinel_id"] = 258
    return parse_mapping(raw).job()


def _config(kind):
    """config.json of a small model, as a dict."""
    if kind in hf_encoders.KINDS:
        folder, name, fields = hf_encoders.KINDS[kind]
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        made = getattr(module, f"{name.partition('For')[0]}Config")(**hf_encoders.SIZES | fields)
        made.architectures = [name]
    elif kind in hf_t5.KINDS:
        module = importlib.import_module("transformers.models.t5.modeling_t5")
        made = module.T5Config(**hf_t5.SIZES | hf_t5.KINDS[kind])
    else:
        made = hf_models.make_config(kind)[0]
    return json.loads(made.to_json_string(use_diff=False))


def _is_read_by_methods(job):
    """Whether the job has parts that each cp method has code for."""
    return any(holds(job) and "cp_method" in names for holds, names in BEARS_ON)


def _methods(job):
    """The cp methods that some layout of the job can have."""
    (option,) = (each for each in OPTIONS if each.name == "cp_method")
    legal = legality(job)
    shapes = [shape for shape in legal_shapes(job, MAX_RANKS) if shape.cp > 1]
    return {m for m in option.values if any(legal(replace(s, cp_method=m)) for s in shapes)}


@pytest.mark.wide
@pytest.mark.parametrize("kind", FAMILIES)
def test_layouts_train_a_family_as_one_rank_does(kind, capsys):
    options = Options(layouts=LAYOUTS, max_ranks=MAX_RANKS, timeout_s=900.0)
    report = api.verify(_job(kind), options=options)
    found = [each.comparison.largest for each in report.outcomes if each.comparison]
    worst = max(found, key=lambda deviation: deviation.value)
    drawn = {each.layout.cp_method for each in report.outcomes if each.layout.cp > 1}
    line = {
        "family": kind, "layouts": report.num_layouts, "largest": worst.value, "of": worst.quantity,
        "cp_methods": sorted(drawn), "passed": report.is_same, "seconds": round(report.seconds, 1),
    }  # fmt: skip
    with capsys.disabled():
        print("\n" + json.dumps(line), flush=True)
    assert report.is_same, report.smallest
    if _is_read_by_methods(report.shrunk.job):
        assert drawn == _methods(report.shrunk.job), "a part meets each cp method that it can have"
