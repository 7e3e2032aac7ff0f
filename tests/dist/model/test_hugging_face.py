"""Hugging Face's transformers as the outside witness: logits, training steps, and the way back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.architectures import ARCHITECTURES
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.loader import Loader
from raymega.data.samples import open_samples
from raymega.messages import Requests
from raymega.optim.lr_schedule import learning_rate
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

LOGITS_LIMIT, TRAINING_LIMIT = 1e-10, 1e-9
STEPS = 3
NOW = "2025-01-01T00:00:00+00:00"


@pytest.fixture(params=hf_models.KINDS)
def kind(request):
    return request.param


def _import(tmp_path, model):
    model.save_pretrained(tmp_path / "theirs")
    return hf_import(
        tmp_path / "theirs", str(tmp_path / "ours"), created=NOW, make_vocab_size_divisible_by=8
    )


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


def _logits(env, model, uri, num_stages):
    """This rank's columns [B, S, V/tp], through stages that this process holds all of."""
    groups, sp = (
        env.groups,
        SequenceParallel(tp=env.groups.tp, is_sequence_parallel=False),
    )
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    modules = make_stage_modules(model, num_stages=num_stages, sp=sp, experts=experts)
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    *body, last = modules
    hidden = None
    with torch.no_grad():
        for module in body:
            hidden = module(_tokens(), None, torch.ones(3, 40), hidden)
        return last.logits(_tokens(), hidden).transpose(0, 1).contiguous()


@pytest.mark.sample(5)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)], ids=["tp1-pp1", "tp2-pp2"])
def test_logits_are_those_of_transformers(tmp_path, kind, tp, pp):
    theirs = hf_models.make_model(kind)
    done = _import(tmp_path, theirs)
    columns = run_grid(_logits, Grid(tp=tp), done.model, done.uri, pp)
    ours = torch.cat(columns, -1)[..., : done.model.vocab_size]
    with torch.no_grad():
        assert plain_models.difference(ours, hf_models.logits(theirs, _tokens())) < LOGITS_LIMIT


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("tp", "ep", "pp"), [(1, 1, 1), (2, 2, 2)], ids=["one-rank", "tp2-ep2-pp2"]
)
@pytest.mark.parametrize("kind", hf_models.EXPERTS)
def test_logits_of_experts_are_those_of_transformers(tmp_path, kind, tp, ep, pp):
    theirs = hf_models.make_model(kind)
    done = _import(tmp_path, theirs)
    columns = run_grid(_logits, Grid(tp=tp, ep=ep), done.model, done.uri, pp)
    ours = torch.cat(columns, -1)[..., : done.model.vocab_size]
    with torch.no_grad():
        assert plain_models.difference(ours, hf_models.logits(theirs, _tokens())) < LOGITS_LIMIT


@pytest.mark.parametrize("kind", hf_models.IN_OTHER_WORDS)
def test_logits_are_those_of_transformers_where_the_section_says_it_in_other_words(tmp_path, kind):
    theirs = hf_models.make_model(kind)
    done = _import(tmp_path, theirs)
    assert done.model.moe.n_group == 1
    assert bool(done.model.moe.num_experts) is not kind.endswith("dense")
    (ours,) = run_grid(_logits, Grid(), done.model, done.uri, 1)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours[..., : done.model.vocab_size], wanted) < LOGITS_LIMIT


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
    (ours,) = run_grid(_logits, Grid(), done.model, done.uri, pp)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours[..., : done.model.vocab_size], wanted) < LOGITS_LIMIT
    hf_export(done.uri, tmp_path / "back")
    again = hf_models.load_model(tmp_path / "back")
    assert again.config.model_type == ARCHITECTURES[kind].alias_of
    with torch.no_grad():
        assert plain_models.difference(hf_models.logits(again, _tokens()), wanted) < LOGITS_LIMIT


def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    _check_way_back(tmp_path, kind)


def _check_way_back(tmp_path, kind):
    theirs = hf_models.make_model(kind)
    done = _import(tmp_path, theirs)
    hf_export(done.uri, tmp_path / "back")
    again = hf_models.load_model(tmp_path / "back")
    wanted = theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    with torch.no_grad():
        ours, original = (hf_models.logits(model, _tokens()) for model in (again, theirs))
    assert torch.equal(ours, original)
    hf_import(
        tmp_path / "back", str(tmp_path / "ours2"), created=NOW, make_vocab_size_divisible_by=8
    )
    hf_export(str(tmp_path / "ours2"), tmp_path / "back2")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "back2" / name).read_bytes()


def _plan(done, layout):
    fields = done.model.model_dump(mode="json")
    return make_test_plan(
        *[f"model.{name}={value}" for name, value in fields.items()],
        *layout_overrides(layout),
        f"checkpoint.init_from={done.uri}",
        "run.eval_samples=0",
        "optimizer.lr_warmup_steps=1",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0.3",
        "optimizer.eps=1e-6",
        "optimizer.max_grad_norm=0.5",
    )


def _train(env, plan_json):
    """Losses and norms, and this rank's blocks of the trained weights."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    state, curve = TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
    blocks = [
        (block.tensor, block.box, block.values.numpy().copy())
        for block in parts.optimizer.blocks()
        if block.kind == "model"
    ]
    return curve, blocks


def _micro_batches(plan, state):
    job = plan.job
    loader = Loader(open_samples(job), dp_rank=0, device="cpu")
    return loader.micro_batches(plan.batch, state.samples)


def _train_plainly(model, plan):
    """The loop that anyone would write around transformers and torch.optim.AdamW."""
    section = plan.job.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": section.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(section.beta1, section.beta2),
        eps=section.eps,
    )
    state, curve = TrainState(), []
    for step in range(STEPS):
        batches = _micro_batches(plan, state)
        count = sum(int(batch.mask.sum()) for batch in batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            flat = hf_models.logits(model, batch.tokens).flatten(0, 1)
            part = cross_entropy(flat, batch.labels.flatten(), reduction="sum") / count
            part.backward()
            loss += float(part)
        norm = float(
            torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
        for param in model.parameters():
            param.grad *= min(1.0, section.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
        optimizer.step()
        curve.append((loss, norm))
        state = state.advance(samples=plan.batch.global_batch_size, tokens=count)
    return curve


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2"])
def test_steps_are_those_of_a_plain_loop(tmp_path, kind, layout):
    _check_steps(tmp_path, kind, layout)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("mixtral", "tp2-ep2"), ("qwen2_moe", "dp2-ep2"), ("deepseek_v3", "tp2-dp2-ep2-etp2")],
)
def test_steps_with_experts_are_those_of_a_plain_loop(tmp_path, kind, layout):
    _check_steps(tmp_path, kind, layout)


def _check_steps(tmp_path, kind, layout):
    theirs = hf_models.make_model(kind)
    done = _import(tmp_path, theirs)
    plan = _plan(done, layout)
    results = run_grid(_train, plan.grid, plan.to_json())
    curve = _train_plainly(theirs, _plan(done, "tp1"))
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = {}
    for _, blocks in results:
        for tensor, box, values in blocks:
            whole.setdefault(tensor.name, np.full(tensor.shape, np.nan))[
                plain_models.slices(box)
            ] = values
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        parts = [whole[part.name] for part in at.parts]
        if at.expert >= 0:
            parts = [part[at.expert] for part in parts]
        rows = np.concatenate(parts)[: at.num_rows]
        ours = torch.from_numpy(rows.T if at.is_transposed else rows)
        assert plain_models.difference(ours, wanted[at.name]) < TRAINING_LIMIT, at.name
