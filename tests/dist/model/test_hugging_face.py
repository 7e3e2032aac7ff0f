"""Hugging Face's transformers as the outside witness: logits, training steps, and the way back."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raymega import plugins
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.parallel import ParallelSection
from raymega.convert.huggingface.architectures import ARCHITECTURES
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import (
    MicroBatch,
    Rows,
    held_positions,
    make_context,
)
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from tests.support.outside_package import STABLELM, write_package
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.support.references.imported import imported
from tests.support.references.plain_training import (
    LOGITS_LIMIT,
    TRAINING_LIMIT,
    train_plainly,
    train_rank,
    training_plan,
    whole_weights,
)
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

NOW = "2025-01-01T00:00:00+00:00"
ACME = ("acme.plugins",)


@pytest.fixture(params=hf_models.KINDS)
def kind(request):
    return request.param


def _tokens():
    return torch.randint(0, 259, (3, 40), generator=torch.Generator().manual_seed(5))


def _blocks(module):
    return [
        TensorBlock(
            kind="model", tensor=piece.tensor, box=piece.box, is_primary=True,
            values=param.data[piece.place],
        )
        for param in module.parameters()
        for piece in param.spec.pieces
    ]  # fmt: skip


def _logits(env, model, uri, num_stages, cp_method="ring"):
    """This rank's logits [B, S/cp, V/tp], with its columns' place on tp and the positions of its tokens.

    The process holds all stages.
    """
    groups, sp = (
        env.groups,
        SequenceParallel(tp=env.groups.tp, is_sequence_parallel=False),
    )
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    sizes = ParallelSection(cp=groups.cp.size, cp_method=cp_method)
    context = make_context(groups, sizes, CommLog())
    options = {"num_stages": num_stages, "sp": sp, "experts": experts, "context": context}
    modules = make_stage_modules(model, **options)
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    tokens = _tokens()
    at = held_positions(((tokens.shape[1],),), context)
    own, hidden = tokens[:, at[0]], None
    batch = MicroBatch(
        tokens=own, labels=own, mask=torch.ones(own.shape), num_counted=own.numel(),
        samples=torch.zeros(len(own)), rows=Rows(at, ((tokens.shape[1],),)),
    )  # fmt: skip
    with torch.no_grad():
        for module in modules:
            hidden = module.evaluated(batch, hidden)
        columns = modules[-1].head(hidden).transpose(0, 1).contiguous()
    return groups.tp.index, at[0], columns


def _whole(parts, model):
    """All logits [B, S, V], from those of each rank."""
    width = max(columns.shape[2] for _, _, columns in parts)
    whole = torch.full((*_tokens().shape, width * (1 + max(tp for tp, _, _ in parts))), torch.nan)
    whole = whole.double()
    for tp, at, columns in parts:
        first = width * tp
        whole[:, at, first : first + columns.shape[2]] = columns
    return whole[..., : model.vocab_size]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)], ids=["tp1-pp1", "tp2-pp2"])
def test_logits_are_those_of_transformers(tmp_path, kind, tp, pp):
    theirs = hf_models.make_model(kind)
    done = imported(tmp_path, theirs)
    ours = _whole(run_grid(_logits, Grid(tp=tp), done.model, done.uri, pp), done.model)
    with torch.no_grad():
        assert plain_models.difference(ours, hf_models.logits(theirs, _tokens())) < LOGITS_LIMIT


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("tp", "ep", "pp"), [(1, 1, 1), (2, 2, 2)], ids=["one-rank", "tp2-ep2-pp2"]
)
@pytest.mark.parametrize("kind", hf_models.EXPERTS)
def test_logits_of_experts_are_those_of_transformers(tmp_path, kind, tp, ep, pp):
    theirs = hf_models.make_model(kind)
    done = imported(tmp_path, theirs)
    ours = _whole(run_grid(_logits, Grid(tp=tp, ep=ep), done.model, done.uri, pp), done.model)
    with torch.no_grad():
        assert plain_models.difference(ours, hf_models.logits(theirs, _tokens())) < LOGITS_LIMIT


@pytest.mark.parametrize("kind", hf_models.IN_OTHER_WORDS)
def test_logits_are_those_of_transformers_where_the_section_says_it_in_other_words(tmp_path, kind):
    theirs = hf_models.make_model(kind)
    done = imported(tmp_path, theirs)
    assert done.model.moe.n_group == 1
    assert bool(done.model.moe.num_experts) is not kind.endswith("dense")
    ours = _whole(run_grid(_logits, Grid(), done.model, done.uri, 1), done.model)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours, wanted) < LOGITS_LIMIT


@pytest.mark.parametrize("kind", hf_models.EXPERTS)
def test_way_back_of_experts_is_bit_exact(tmp_path, kind):
    _check_way_back(tmp_path, kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", hf_models.ALIASES)
def test_an_alias_is_the_network_under_its_first_name(tmp_path, kind, pp):
    """Kimi-K2's own code is DeepSeek-V3's, so a model of that is saved with Kimi-K2's config.json."""
    theirs = hf_models.make_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    told = json.loads(config.read_text()) | (hf_models.KIMI_K2 if kind == "kimi_k2" else {})
    config.write_text(json.dumps(told))
    assert told["model_type"] == kind
    done = hf_import(tmp_path / "theirs", str(tmp_path / "ours"), created=NOW)
    ours = _whole(run_grid(_logits, Grid(), done.model, done.uri, pp), done.model)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours, wanted) < LOGITS_LIMIT
    hf_export(done.uri, tmp_path / "back")
    again = hf_models.load_model(tmp_path / "back")
    assert again.config.model_type == ARCHITECTURES[kind].alias_of
    with torch.no_grad():
        assert plain_models.difference(hf_models.logits(again, _tokens()), wanted) < LOGITS_LIMIT


LAYOUTS = {"one": (1, 1, 1), "tp2-cp2-pp2": (2, 2, 2)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", hf_models.FAMILIES)
def test_logits_of_families_are_those_of_transformers(tmp_path, kind, layout):
    theirs, (tp, cp, pp) = hf_models.make_model(kind), LAYOUTS[layout]
    done = imported(tmp_path, theirs)
    ep = 2 if tp > 1 and kind in hf_models.HAVE_EXPERTS else 1
    parts = run_grid(_logits, Grid(tp=tp, cp=cp, ep=ep), done.model, done.uri, pp)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(_whole(parts, done.model), wanted) < LOGITS_LIMIT


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", hf_models.FAMILIES)
def test_way_back_of_families_is_bit_exact(tmp_path, kind):
    _check_way_back(tmp_path, kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2-cp2"])
@pytest.mark.parametrize("kind", hf_models.FAMILIES)
def test_steps_of_families_are_those_of_a_plain_loop(tmp_path, kind, layout):
    has_experts = kind in hf_models.HAVE_EXPERTS
    _check_steps(tmp_path, kind, f"{layout}-ep2" if has_experts and layout != "tp1" else layout)


def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    _check_way_back(tmp_path, kind)


def _check_way_back(tmp_path, kind):
    theirs = hf_models.make_model(kind)
    done = imported(tmp_path, theirs)
    hf_export(done.uri, tmp_path / "back")
    again = hf_models.load_model(tmp_path / "back")
    wanted = theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values.to(wanted[name].dtype), wanted[name]), name
    with torch.no_grad():
        ours, original = (hf_models.logits(model, _tokens()) for model in (again, theirs))
    assert torch.equal(ours, original)
    hf_import(
        tmp_path / "back", str(tmp_path / "ours2"), created=NOW, make_vocab_size_divisible_by=8
    )
    hf_export(str(tmp_path / "ours2"), tmp_path / "back2")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "back2" / name).read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2"])
def test_steps_are_those_of_a_plain_loop(tmp_path, kind, layout):
    _check_steps(tmp_path, kind, layout)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "cp2", "dp3"])
def test_steps_on_answers_alone_are_those_of_a_plain_loop(tmp_path, layout):
    """Numbers of labels differ between micro-batches and ranks: a mean of their means would be another loss."""
    _check_steps(tmp_path, "llama3", layout, "data.loss_on=assistant")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixtral", "tp2-ep2"),
        ("qwen2_moe", "dp2-ep2"),
        ("deepseek_v3", "tp2-dp2-ep2-etp2"),
        ("gpt_oss", "tp2-dp2-ep2-etp2"),
    ],
)
def test_steps_with_experts_are_those_of_a_plain_loop(tmp_path, kind, layout):
    _check_steps(tmp_path, kind, layout)


def _check_steps(tmp_path, kind, layout, *options):
    theirs = hf_models.make_model(kind)
    _compare_steps(tmp_path, theirs, imported(tmp_path, theirs), layout, *options)


def _compare_steps(tmp_path, theirs, done, layout, *options, run=run_grid):
    options = (f"checkpoint.init_from={done.uri}", *options)
    plan = training_plan(done.model, layout, *options)
    results = run(train_rank, plan.grid, plan.to_json())
    curve = train_plainly(theirs, theirs, training_plan(done.model, "tp1", *options))
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = whole_weights(results)
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        parts = [whole[part.name] for part in at.parts]
        if at.expert >= 0:
            parts = [part[at.expert] for part in parts]
        if at.is_of_all_experts:
            ours = torch.from_numpy(at.of_experts(parts))
            assert plain_models.difference(ours, wanted[at.name]) < TRAINING_LIMIT, at.name
            continue
        rows = at.by_head(np.concatenate(parts))[: at.num_rows]
        ours = torch.from_numpy(rows.T if at.is_transposed else rows)
        assert plain_models.difference(ours, wanted[at.name]) < TRAINING_LIMIT, at.name


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Folder of the package of docs/extending.md, which has the family StableLM, known to this process alone."""
    folder = write_package(tmp_path / "package")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_PARTS", dict(plugins._PARTS))
    _use(folder)
    yield folder
    plugins.registry_of.cache_clear()
    plugins._loaded.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def _use(folder):
    sys.path.insert(0, str(folder))
    plugins.registry_of(ACME)


def _with_package(env, folder, function, *args):
    _use(folder)
    return function(env, *args)


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
def test_family_of_a_plug_in_is_that_of_transformers(tmp_path, package, layout):
    """StableLM of docs/extending.md: logits, training steps, and the way back."""

    def run(function, grid, *args):
        return run_grid(_with_package, grid, package, function, *args)

    from transformers import StableLmConfig, StableLmForCausalLM

    torch.manual_seed(4)
    theirs = StableLmForCausalLM(StableLmConfig(**STABLELM)).double().eval()
    done, (tp, cp, pp) = imported(tmp_path, theirs, plugins=ACME), LAYOUTS[layout]
    assert done.model.family == "acme.stablelm"
    ours = _whole(run(_logits, Grid(tp=tp, cp=cp), done.model, done.uri, pp), done.model)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours, wanted) < LOGITS_LIMIT
    hf_export(done.uri, tmp_path / "back")
    back, weights = load_file(tmp_path / "back" / "model.safetensors"), theirs.state_dict()
    assert all(torch.equal(back[name], values) for name, values in weights.items())
    sizes = f"tp{tp}-pp{pp}-cp{cp}"
    _compare_steps(
        tmp_path, theirs, done, sizes, "plugins.modules=[acme.plugins]", run=run,
    )  # fmt: skip
