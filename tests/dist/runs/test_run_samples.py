"""Samples of text in a run: the same on every layout, and training does not notice them."""

import numpy as np
import pytest
from PIL import Image

from raymega.data.format import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from raymega.events import SamplesDrawn
from raymega.messages import Requests
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.group_usage import unused_groups
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.train.build import build_parts
from raymega.train.run_samples import RunSampler
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.channels import KeptReports
from tests.support.jobs import make_test_plan
from tests.support.ranks import run_grid
from tests.unit.data.datasets import write_dataset

pytestmark = pytest.mark.dist
STEPS = 4
SAMPLED = (
    "run.samples_every=2", "run.sample_prompts=['ab', 'once upon']", "run.sample_tokens=4",
    "run.sample_temperature=1.2",
)  # fmt: skip
EXPERTS = ("model.moe.num_experts=4", "model.moe.intermediate_size=16")
LAYOUTS = {
    "tp2 sp pp2": ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2"),
    "cp2 dp2 parameters": ("parallel.cp=2", "parallel.dp=2", "parallel.sharding=parameters"),
    "dp2 optimizer": ("parallel.dp=2", "parallel.sharding=optimizer"),
    "pp2 interleaved": ("parallel.pp=2", "schedule.name=interleaved", "schedule.chunks=2"),
    "pp2 zero bubble": ("parallel.pp=2", "schedule.name=zb_h1"),
    "recomputed": ("memory.recompute=full", "model.hidden_dropout=0.1"),
    "offloaded": ("memory.offload=[activations]",),
    "latent mtp": (
        "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false",
        "model.num_nextn_predict_layers=1",
        "model.mla={kv_lora_rank: 8, q_lora_rank: 6, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 3}",
    ),
    "ep2": ("parallel.dp=2", "parallel.ep=2", *EXPERTS, "model.moe.expert_bias=true",
            "model.moe.router_score_function=sigmoid", "model.moe.expert_bias_update_rate=0.1"),
    "fp8": ("precision.fp8=rowwise", "precision.fp8_end_blocks=0"),
    "dynamic cp": ("parallel.dp=2", "parallel.dynamic_cp=true", "data.packing=best_fit", "schedule.micro_batch_size=1",
                   "data.packing_window=64", "data.document_multiple=4"),
}  # fmt: skip


def _train(env, plan_json):
    plan, channel = read_plan(plan_json), KeptReports()
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    sampler, state, curve = RunSampler(parts, channel, env.rank), TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        sampler.report_when_due(state.step)
        curve.append((outcome.loss.hex(), outcome.grad_norm.hex()))
    held = [p for module in parts.modules for p in module.parameters()]
    assert all(isinstance(param, ShardedParameter) for param in held)
    return curve, [r for r in channel.reports if isinstance(r, SamplesDrawn)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset of random bytes, with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    write_dataset(folder, train=(50,) * 5, valid=(40,) * 5)
    (folder / TOKENIZER_FILE).write_text(byte_tokenizer())
    assert not (folder / TOKENIZER_CONFIG_FILE).exists()
    return f"data.path={folder}"


def _run(*overrides):
    plan = make_test_plan("model.vocab_size=257", "parallel.pp=1", *overrides)
    parallel = plan.job.parallel
    results = run_grid(
        _train,
        plan.grid,
        plan.to_json(),
        hierarchical_cp_size=inner_ranks(parallel),
        is_nested=parallel.dynamic_cp,
        sharers=data_parallel_shard_size(parallel),
        unused=unused_groups(plan),
    )
    return results[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_training_with_samples_has_the_same_bits(layout, dataset):
    plain, none = _run(dataset, *layout)
    curve, samples = _run(dataset, *layout, *SAMPLED)
    assert curve == plain and none == []
    assert [each.step for each in samples] == [2, 4]
    assert all(len(text) for each in samples for text in each.texts)


@pytest.mark.wide
def test_samples_are_the_same_on_every_layout(dataset):
    _, wanted = _run(dataset, *SAMPLED)
    for name in ("tp2 sp pp2", "cp2 dp2 parameters", "pp2 interleaved"):
        assert _run(dataset, *LAYOUTS[name], *SAMPLED)[1] == wanted, name


IMAGES = (
    "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 16, num_heads: 2, "
    "ffn_hidden_size: 32, image_token_id: 257, initializer_range: 1.0}",
    "run.samples_every=2", "run.sample_prompts=['a<image>', 'no', '<image>b<image>']", "run.sample_tokens=8",
    "model.initializer_range=0.3",
)  # fmt: skip


# each picture has its own size
SEVERAL = (
    IMAGES[0].replace("clip, image_size: 8, patch_size: 4", "qwen2_vl, max_pixels: 96, patch_size: 2, spatial_merge_size: 2"),
    *IMAGES[1:],
)  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("images", [IMAGES, SEVERAL], ids=["one size", "several"])
def test_samples_see_their_images_on_every_layout(tmp_path, images):
    write_dataset(tmp_path, train=(50,) * 5, valid=(40,) * 5)
    (tmp_path / TOKENIZER_FILE).write_text(byte_tokenizer("<image>"))
    for number in range(3):
        pixels = np.random.default_rng(number).integers(
            256, size=(8, 4 + 4 * number, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")

    def run(order, *layout):
        files = [str(tmp_path / f"{number}.png") for number in order]
        own = (*images, f"run.sample_images={files}", "model.vocab_size=264")
        return _run(f"data.path={tmp_path}", *own, *layout)

    curve, wanted = run((0, 1, 2))
    assert [each.step for each in wanted] == [2, 4]
    other_curve, other = run((1, 0, 2))
    assert other_curve == curve, "training does not notice them"
    pairs = list(zip(wanted, other, strict=True))
    assert all(one.texts[1] == another.texts[1] for one, another in pairs), "it has no image"
    assert any(one.texts[0] != another.texts[0] for one, another in pairs)
    balanced = (*LAYOUTS["cp2 dp2 parameters"], "parallel.balance_images=true")
    for layout in (LAYOUTS["tp2 sp pp2"], balanced, (*LAYOUTS["dp2 optimizer"], balanced[-1])):
        assert run((0, 1, 2), *layout)[1] == wanted, layout
