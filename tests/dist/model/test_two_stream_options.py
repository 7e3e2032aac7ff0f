"""Options of encoder-decoder models: transformers' T5 with raymega's dropout masks, and PEFT's adapters, have the same steps."""

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.data.samples import open_samples
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_t5
from tests.support.references.hf_t5_dropout import GivenDropout
from tests.support.references.imported import imported
from tests.unit.convert.folders import NOW

pytestmark = pytest.mark.dist
LIMIT, HIDDEN, WEIGHTS = 1e-9, 0.2, 0.3
SPANS = "{text_seq_len: 34, first_sentinel_id: 258, num_sentinels: 50, eos_token_id: 1, decoder_start_token_id: 0}"
CASES = [
    ("t5", "tp1", WEIGHTS, ()),
    ("t5_v1_1", "tp2-sp-pp2", WEIGHTS, ()),
    ("t5_v1_1", "tp2-sp-cp2", 0.0, ("parallel.cp_method=all_gather", "memory.recompute=full")),
    ("t5", "dp3", WEIGHTS, ("memory.recompute=selective", "memory.recompute_parts=[attention]")),
    ("t5", "cp2-pp2", 0.0, ("parallel.cp_method=all_gather", "data.packing=best_fit")),
]


def _plan(done, layout, weights, *options, base="", hidden=HIDDEN):
    sides = done.model.encoder_decoder.model_copy(update={"decoder_seq_len": 16})
    dropped = {"hidden_dropout": hidden, "attention_dropout": weights}
    model = done.model.model_copy(update={"encoder_decoder": sides, **dropped})
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in model.model_dump(mode="json").items()],
        *layout_overrides(layout),
        f"checkpoint.init_from={base or done.uri}",
        f"data.span_corruption={SPANS}",
        "data.seq_len=56",
        "data.global_batch_size=5",
        "run.eval_samples=0",
        *options,
    )  # fmt: skip


def _step(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    return outcome.loss, outcome.grad_norm


def _plainly(model, plan, given):
    """The loss and the gradient's norm of the first batch, document by document."""
    job = plan.job
    samples, size, total = open_samples(job), job.data.seq_len - 16, 0.0
    rows = [samples.row(number) for number in range(plan.batch.global_batch_size)]
    count = sum(int(row.mask.sum()) for row in rows)
    for sample, row in enumerate(rows):
        for number in set(row.stream_documents[row.stream_documents >= 0].tolist()):
            (at,) = np.nonzero(row.stream_documents == number)
            source, target = at[at < size], at[at >= size]
            given.read(sample, source, target)
            read = [torch.from_numpy(row.tokens[part])[None] for part in (source, target)]
            made = hf_t5.logits(model, *read)[0]
            loss = (
                cross_entropy(made, torch.from_numpy(row.labels[target]), reduction="sum") / count
            )
            loss.backward()
            total += float(loss.detach())
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return total, float(torch.linalg.vector_norm(gradients))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "layout", "weights", "options"), CASES)
def test_a_step_is_that_of_transformers_with_the_same_masks(
    tmp_path, kind, layout, weights, options
):
    theirs = hf_t5.make_model(kind)
    done = imported(tmp_path, theirs)
    plan = _plan(done, layout, weights, *options)
    results = run_grid(_step, plan.grid, plan.to_json())
    given = GivenDropout(theirs, plan.job.run.seed, hidden=HIDDEN, weights=weights)
    # transformers drops weights by a function, and everything else by modules, which have been replaced
    with patch("torch.nn.functional.dropout", given.drop_weights):
        wanted = _plainly(theirs, plan, given)
    for ours in results:
        np.testing.assert_allclose(ours, wanted, rtol=LIMIT)


TARGETS = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
ADAPTED = [
    ("tp2-sp-pp2", ()),
    ("tp2-cp2", ("parallel.cp_method=all_gather", "memory.recompute=full")),
    ("dp2", ("parallel.sharding=parameters",)),
]


def _adapted(tmp_path):
    """T5 1.1 with random adapters of PEFT, and both imported."""
    peft = pytest.importorskip("peft")
    theirs = hf_t5.make_model("t5_v1_1")
    base = imported(tmp_path, theirs, name="base")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(theirs, config, autocast_adapter_dtype=False).double().eval()
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = 0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    model.save_pretrained(tmp_path / "peft")
    done = peft_import(tmp_path / "peft", base.uri, str(tmp_path / "adapters"), created=NOW)
    return model, done


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "options"), ADAPTED)
def test_adapters_are_those_of_peft(tmp_path, layout, options):
    """A step's loss and gradients, and the files both ways."""
    model, done = _adapted(tmp_path)
    start = f"checkpoint.init_adapter={done.uri}"
    plan = _plan(done, layout, 0.0, start, *options, base=done.base, hidden=0.0)
    results = run_grid(_step, plan.grid, plan.to_json())
    inner = model.base_model.model
    given = GivenDropout(inner, plan.job.run.seed, hidden=0.0, weights=0.0)
    wanted = _plainly(inner, plan, given)
    for ours in results:
        np.testing.assert_allclose(ours, wanted, rtol=LIMIT)
    peft_export(done.uri, tmp_path / "back")
    files = [tmp_path / at / "adapter_model.safetensors" for at in ("peft", "back")]
    saved, back = (load_file(file) for file in files)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], values) for name, values in saved.items())
