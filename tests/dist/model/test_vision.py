"""Transformers' LLaVA and Qwen2-VL as the outside witness of models that read images: logits, training steps, and the way back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.parallel import ParallelSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.families.images.image_families import image_family_of
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.images.image_batch import ImageShare
from raymega.data.images.image_rows import ImageRows
from raymega.data.loader import Loader
from raymega.data.rows import Row
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import make_context
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.batch import make_batch
from raymega.plan.grid import Grid
from tests.dist.model.test_hugging_face import _blocks
from tests.support.ranks import run_grid
from tests.support.references import hf_llava, plain_models
from tests.support.references.imported import imported
from tests.support.references.plain_training import (
    LOGITS_LIMIT,
    TRAINING_LIMIT,
    train_rank,
    training_plan,
    whole_weights,
)
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

LENGTH, NUM_ROWS = 24, 8


@pytest.fixture(params=hf_llava.KINDS)
def kind(request):
    return request.param


def _imported(folder, model, kind):
    done = imported(folder, model)
    # config.json of Qwen2-VL does not say how large images are
    vision = done.model.vision.model_copy(update=hf_llava.sizes_of(kind))
    return replace(done, model=done.model.model_copy(update={"vision": vision}))


class _Rows:
    """Rows of one document each with 0 to 3 images."""

    seq_len = LENGTH

    def __init__(self, vision):
        self.rule = ImageRows(vision=vision, name="test", is_drawn=True)

    def row(self, number, /):
        tokens = np.random.default_rng(number).integers(0, 258, LENGTH + 1)
        plain = Row(
            tokens=tokens[:-1], labels=tokens[1:], mask=np.ones(LENGTH, bool), documents=(LENGTH,)
        )
        return self.rule.row(plain, number)


def _outputs(env, model, uri, num_stages, is_cut):
    """This rank's logits [B, S/cp, V/tp] and the places of its tokens; the process holds all stages."""
    groups = env.groups
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=is_cut)
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    context = make_context(groups, ParallelSection(cp=groups.cp.size, cp_method="ring"), CommLog())
    modules = make_stage_modules(
        model, num_stages=num_stages, sp=sp, experts=experts, context=context
    )
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    tp, cp = groups.tp.size, groups.cp.size
    share = ImageShare(
        vision=model.vision, index=groups.cp.index * tp + groups.tp.index, size=tp * cp
    )
    loader = Loader(
        _Rows(model.vision),
        dp_rank=0,
        device="cpu",
        context=context,
        images=share,
        vision=model.vision,
    )
    batch = make_batch(global_batch_size=NUM_ROWS, micro_batch_size=NUM_ROWS, dp=1)
    (micro,) = loader.micro_batches(batch, 0)
    hidden = None
    with torch.no_grad():
        for module in modules:
            hidden = module.evaluated(micro, hidden)
        columns = modules[-1].head(hidden).transpose(0, 1).contiguous()
    return groups.tp.index, micro.rows.row_positions[0], columns


LAYOUTS = {
    "one": (Grid(), 1, False),
    "tp2-pp2": (Grid(tp=2), 2, False),
    "tp2-sp-cp2-pp3": (Grid(tp=2, cp=2), 3, True),
    "cp2": (Grid(cp=2), 1, False),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(tmp_path, kind, layout):
    _check_logits(tmp_path, kind, layout)


def test_a_factor_on_the_embedding_is_on_images_too(tmp_path):
    assert _check_logits(tmp_path, "granite", "one").multipliers.embedding == 3.0


def _check_logits(folder, kind, layout):
    """Compare the logits of rows with transformers' and return the model."""
    theirs, (grid, pp, is_cut) = hf_llava.make_model(kind), LAYOUTS[layout]
    done = _imported(folder, theirs, kind)
    named = {"granite": "clip", "native": "qwen2_vl"}
    assert done.model.vision.kind == named.get(kind, kind)
    parts = run_grid(_outputs, grid, done.model, done.uri, pp, is_cut)
    width = parts[0][2].shape[2]
    ours = torch.full((NUM_ROWS, LENGTH, width * grid.tp), torch.nan, dtype=torch.float64)
    for tp, at, columns in parts:
        ours[:, at, width * tp : width * tp + columns.shape[2]] = columns
    rows, counts, grids = _Rows(done.model.vision), set(), set()
    for number in range(NUM_ROWS):
        row = rows.row(number)
        counts.add(len(row.images))
        images = [image() for image in row.images]
        grids |= {*map(hf_llava.grid_of, images)}
        with torch.no_grad():
            tokens = torch.from_numpy(row.tokens)[None]
            wanted = hf_llava.logits(theirs, tokens, images, done.model.vision)[0]
        found = ours[number, :, : done.model.vocab_size]
        assert plain_models.difference(found, wanted) < LOGITS_LIMIT
    assert counts == {0, 1, 2, 3}
    assert len(grids) > 5 if kind == "native" else len(grids) == 1
    return done.model


def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    theirs = hf_llava.make_model(kind)
    done = _imported(tmp_path, theirs, kind)
    hf_export(done.uri, tmp_path / "back")
    again, wanted = hf_llava.load_model(tmp_path / "back", kind), theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    settings, mine = theirs.config.to_dict(), again.config.to_dict()
    named = ("vision_feature_layer", "vision_feature_select_strategy", "image_token_index")
    for name in ("image_token_id",) if hf_llava.is_qwen2_vl(kind) else named:
        assert mine[name] == settings[name], name
    if hf_llava.is_qwen2_vl(kind):
        assert mine["text_config"]["rope_parameters"] == settings["text_config"]["rope_parameters"]
        return
    pixels = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert pixels["image_mean"] == list(done.model.vision.image_mean)


TRAINED = {
    "all": (),
    "frozen tower": (
        'model.freeze=["vision.*"]', 'model.train=["vision.projector.*"]', "data.packing=best_fit", "data.document_multiple=4",
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2", "cp2", "dp3", "tp2-sp-cp2"])
def test_steps_are_those_of_a_plain_loop(tmp_path, kind, layout, trained):
    theirs = hf_llava.make_model(kind)
    done = _imported(tmp_path, theirs, kind)
    options = (f"checkpoint.init_from={done.uri}", *TRAINED[trained])
    plan = training_plan(done.model, layout, *options)
    results = run_grid(train_rank, plan.grid, plan.to_json())
    if trained == "frozen tower":
        is_qwen2_vl = hf_llava.is_qwen2_vl(kind)
        tower = theirs.model.visual if is_qwen2_vl else theirs.model.vision_tower
        tower.requires_grad_(False)
        if is_qwen2_vl:
            tower.merger.requires_grad_(True)
    curve = hf_llava.train_plainly(theirs, plan)
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = whole_weights(results)
    theirs.save_pretrained(tmp_path / "trained")
    saved = load_file(tmp_path / "trained" / "model.safetensors")
    known_name = image_family_of(done.model.vision).known_name
    wanted = {known_name(name): values for name, values in saved.items()}
    for at in hf_tensors(done.model):
        rows = np.concatenate([whole[part.name] for part in at.parts])[: at.num_rows]
        found = plain_models.difference(torch.from_numpy(rows.reshape(at.shape)), wanted[at.name])
        assert found < TRAINING_LIMIT, at.name
