"""Sentences that a published encoder finds alike are alike here too: MiniLM's mean-pooled states against transformers'."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.parallel import ParallelSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.data.heads.score_batch import score_batch
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import (
    EncoderInput,
    MicroBatch,
    Rows,
    held_positions,
    make_context,
)
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from tests.dist.model.test_hugging_face import _blocks
from tests.support import minilm
from tests.support.ranks import run_grid
from tests.support.references.plain_models import difference
from tests.unit.convert.folders import NOW
from tests.unit.model.parts import make_stage_modules

pytestmark = [pytest.mark.dist, pytest.mark.wide, pytest.mark.real_model, pytest.mark.timeout(1800)]
LIMITS = {"float32": 1e-5, "float64": 1e-10}
LAYOUTS = {
    "one": (Grid(), 1, False, "ring", 1),
    "tp3-sp-pp2": (Grid(tp=3), 2, True, "ring", 3),
    "tp2-cp2": (Grid(tp=2, cp=2), 1, False, "ring", 4),
    "cp2-gather-pp3": (Grid(cp=2), 3, False, "all_gather", 4),
}
"""Grid, stages, whether positions are cut, method, and what divides a sentence's tokens so that ranks have equal parts."""


def _embeddings(env, model, uri, dtype, sentences, pp, is_cut, method):
    """This rank's part of the mean states [N, D] of the sentences, packed into one row."""
    groups = env.groups
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=is_cut)
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    context = make_context(groups, ParallelSection(cp=groups.cp.size, cp_method=method), CommLog())
    modules = make_stage_modules(
        model, num_stages=pp, sp=sp, experts=experts, context=context, dtype=getattr(torch, dtype)
    )
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    # one row, whose documents do not see each other
    tokens = torch.tensor([[token for ids in sentences for token in ids]])
    lengths = tuple(len(ids) for ids in sentences)
    at = held_positions((lengths,), context)
    row = SimpleNamespace(
        tokens=tokens[0], documents=lengths, lengths=lengths, num_pairs=0, classes=None
    )
    scored = score_batch([row], at, context, pooling=model.head.pooling)
    own, none = tokens[:, at[0]], torch.zeros(0, dtype=torch.int64)
    starts = torch.repeat_interleave(
        torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths)
    )
    batch = MicroBatch(
        tokens=own, labels=own, mask=torch.ones(own.shape), num_counted=own.numel(),
        samples=torch.zeros(1), rows=Rows((torch.arange(len(starts)) - starts)[at], (lengths,)),
        encoder=EncoderInput(token_types=torch.zeros_like(own), first=none, labels=none),
    )  # fmt: skip
    hidden = None
    with torch.no_grad():
        for module in modules:
            hidden = module.eval().evaluated(batch, hidden)
        return groups.tp.index, modules[-1].head.document_sums(hidden, scored)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_similarities_are_those_of_transformers(tmp_path, layout, dtype):
    folder, (grid, pp, is_cut, method, multiple) = minilm.folder(), LAYOUTS[layout]
    sentences = minilm.tokenised(folder, multiple=multiple)
    wanted = minilm.embeddings_of_transformers(folder, sentences, getattr(torch, dtype))
    done = hf_import(folder, str(tmp_path / "ours"), created=NOW, dtype=dtype)
    parts = run_grid(_embeddings, grid, done.model, done.uri, dtype, sentences, pp, is_cut, method)
    # context-parallel ranks have parts of a sentence, tensor-parallel ones the same sums
    ours = sum(part for tp, part in parts if tp == 0)
    assert difference(ours, wanted) < LIMITS[dtype]
    alike, theirs = minilm.similarities(ours), minilm.similarities(wanted.double())
    assert difference(alike, theirs) < LIMITS[dtype]
    # the first and second sentence say the same, the first and third do not
    assert alike[0, 1] > alike[0, 2] + 0.3


def test_way_back_is_bit_exact(tmp_path):
    folder = minilm.folder()
    done = hf_import(folder, str(tmp_path / "ours"), created=NOW)
    hf_export(done.uri, tmp_path / "back")
    whole, back = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "back"))
    # a pooler that no mean reads, and the numbers of positions, stay away
    assert {name.partition(".")[0] for name in whole.keys() - back.keys()} == {
        "pooler",
        "embeddings",
    }
    assert back.keys() <= whole.keys() and all(
        torch.equal(back[name], whole[name]) for name in back
    )
    sentences = minilm.tokenised(folder, multiple=1)
    ours, theirs = (
        minilm.embeddings_of_transformers(at, sentences, torch.float32)
        for at in (tmp_path / "back", folder)
    )
    assert torch.equal(ours, theirs)
