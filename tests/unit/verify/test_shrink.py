"""Small jobs keep what the large one has: ratios, parities, legal degrees, optimizer."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.config.schema import Job
from raymega.data.samples import open_samples
from raymega.errors import ConfigError
from raymega.plan.memory.state_bytes import count_parameters
from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import job_faults
from raymega.verify.legal_layouts import legal_shapes
from raymega.verify.shrink import shrink_job
from raymega.verify.shrinking.model import MAX_LAYERS
from tests.unit.verify.jobs import JOBS, make_job

MAX_PARAMS = 2_000_000


def _shrink(job, *, max_params=MAX_PARAMS, is_data_there=False, seed=None):
    return shrink_job(
        job,
        steps=3,
        max_params=max_params,
        max_ranks=8,
        is_data_there=is_data_there,
        seed=seed,
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("file", sorted(p.name for p in JOBS.glob("*.yaml")))
def test_shipped_job_fits_and_keeps_its_ratios_and_degrees(file):
    job = make_job("cluster.num_workers=grid", file=file)
    small = _shrink(job).job
    was, now = job.model, small.model
    assert count_parameters(now) <= MAX_PARAMS
    assert Fraction(was.num_heads, was.kv_heads) == Fraction(now.num_heads, now.kv_heads)
    assert was.ffn_hidden_size / was.hidden_size == pytest.approx(
        now.ffn_hidden_size / now.hidden_size, rel=0.02
    )
    assert not job_faults(job_values(small))
    wanted = {shape.tp for shape in legal_shapes(job, 8)}
    assert {shape.tp for shape in legal_shapes(small, 8)} == wanted
    kept = (
        "family",
        "tie_word_embeddings",
        "norm_eps",
        "rope_theta",
        "initializer_range",
        "num_kv_heads",
    )
    assert was.model_dump(include=set(kept[:-1])) == now.model_dump(include=set(kept[:-1]))
    assert (was.num_kv_heads == "num_heads") == (now.num_kv_heads == "num_heads")


@pytest.mark.parametrize(
    "override",
    ["parallel.stages=Ett|ttL", "parallel.first_stage_layers=1"],
)
def test_stages_by_hand_are_freed_and_that_is_told(override):
    shrunk = _shrink(make_job(override))
    assert not job_faults(job_values(shrunk.job))
    assert {shape.pp for shape in legal_shapes(shrunk.job, 4)} == {1, 2, 3, 4}
    field = override.partition("=")[0]
    assert [change.why for change in shrunk.changes if change.field == field] == [
        "layouts have other stages"
    ]


@pytest.mark.parametrize(("packing", "path"), [("best_fit", "synthetic"), ("none", "corpus")])
def test_packed_rows_stay_rows_of_several_documents(packing, path):
    words = ("data.path=corpus", "data.seq_len=64", f"data.packing={packing}")
    assert _shrink(make_job(*words), is_data_there=True).job.data.path.endswith(path)


def test_a_job_that_continues_without_a_replica_has_layouts_that_share_the_state_out():
    plain, shrunk = (
        _shrink(make_job(*more)).job for more in ((), ("elastic.on_replica_loss=continue",))
    )
    assert shrunk == plain


@pytest.mark.parametrize("policy", ["rerun", "skip", "rollback"])
def test_a_step_without_numbers_fails_on_every_layout(policy):
    settings = ("elastic.max_bad_steps=9",) if policy == "skip" else ()
    assert _shrink(make_job(f"elastic.on_nan={policy}", *settings)).job.elastic.on_nan == "stop"


def test_a_job_that_keeps_its_best_checkpoints_has_layouts_too():
    job = make_job("run.eval_every=10", "checkpoint.every=10", "checkpoint.keep_best=1")
    small = _shrink(job).job
    assert not job_faults(job_values(small)) and len(list(legal_shapes(small, 4))) > 3


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 5, 8, 12, 32, 96]),
    ratio=st.sampled_from([1, 2, 3, 8]),
    head_width=st.sampled_from([2, 6, 64, 80, 128]),
    layers=st.integers(1, 130),
    vocab=st.sampled_from([64, 257, 32000, 50257, 50304]),
    batch=st.sampled_from([1, 7, 16, 24, 100, 512, 1001]),
)
def test_any_job_fits_and_is_of_the_same_kind(kv_heads, ratio, head_width, layers, vocab, batch):
    heads = kv_heads * ratio
    job = make_job(
        f"model.num_heads={heads}", f"model.num_kv_heads={kv_heads}",
        f"model.hidden_size={heads * head_width}", f"model.ffn_hidden_size={heads * head_width * 4}",
        f"model.num_layers={layers}", "parallel.pp=1", f"model.vocab_size={vocab}",
        f"data.global_batch_size={batch}",
    )  # fmt: skip
    small = _shrink(job).job
    assert count_parameters(small.model) <= MAX_PARAMS and not job_faults(job_values(small))
    assert small.model.num_heads == ratio * small.model.kv_heads
    assert small.model.num_layers == layers or (
        small.model.num_layers <= MAX_LAYERS and small.model.num_layers % 2 == layers % 2
    )
    assert (small.model.vocab_size < small.model.table_rows) == (
        job.model.vocab_size < job.model.table_rows
    )
    for field in ("ffn_hidden_size", "table_rows"):
        was, now = getattr(job.model, field), getattr(small.model, field)
        assert [was % d == 0 for d in range(2, 9)] == [now % d == 0 for d in range(2, 9)], field
    size = small.data.global_batch_size
    assert size == batch or (size % 2 == batch % 2 and _is_power(size) == _is_power(batch))


def _is_power(number):
    return number & (number - 1) == 0


def test_small_job_is_left_as_it_is():
    job = make_job("optimizer.lr_warmup_steps=0")
    shrunk = _shrink(job)
    assert shrunk.changes == () and shrunk.job.model == job.model and shrunk.job.data == job.data


@pytest.mark.parametrize("width", [32, 2048])
def test_key_heads_alone_may_differ_by_layer(width):
    job = make_job(
        f"model.hidden_size={width}", "model.num_heads=8", "model.num_kv_heads=4", "parallel.pp=1",
        "model.layer_sizes={num_kv_heads: [4, 1, 2]}",
    )  # fmt: skip
    small = _shrink(job).job
    assert not job_faults(job_values(small))
    assert len(set(small.model.layer_sizes.num_kv_heads)) == 3
    assert count_parameters(small.model) <= MAX_PARAMS
    if width == 32:
        assert small.model == job.model


def test_sizes_by_layer_stay_different_and_legal():
    """OpenELM's 3B: heads, key heads and widths grow with the layer."""
    heads, kv_heads = (12, 12, 16, 16, 20, 24), (3, 3, 4, 4, 5, 6)
    widths = (1536, 2048, 3072, 4096, 6144, 7680)
    job = make_job(
        "model.family=qwen3", "model.hidden_size=3072", "model.head_dim=128", "model.num_layers=36",
        "model.num_heads=24", "model.num_kv_heads=6", "model.ffn_hidden_size=7680", "parallel.pp=1",
        f"model.layer_sizes={{num_heads: {list(heads)}, num_kv_heads: {list(kv_heads)}, "
        f"ffn_hidden_size: {list(widths)}}}",
    )  # fmt: skip
    small = _shrink(job).job
    sizes, model = small.model.layer_sizes, small.model
    assert count_parameters(model) <= MAX_PARAMS
    assert not job_faults(job_values(small))
    assert len(set(sizes.num_kv_heads)) > 1 and len(set(sizes.ffn_hidden_size)) > 1
    ratios = [q // kv for q, kv in zip(sizes.num_heads, sizes.num_kv_heads, strict=True)]
    assert ratios == [4] * len(ratios)
    assert {shape.tp for shape in legal_shapes(small, 8)} == {
        shape.tp for shape in legal_shapes(job, 8)
    }


def test_changes_are_named_once_with_the_jobs_own_value():
    changes = {
        change.field: change for change in _shrink(make_job(file="llama-70b-512gpu.yaml")).changes
    }
    assert str(changes["model.hidden_size"]).startswith("model.hidden_size 8192 -> ")
    assert len(changes) == len(_shrink(make_job(file="llama-70b-512gpu.yaml")).changes)
    assert "cannot be read" in str(changes["data.path"])


def test_real_data_is_used_while_the_vocabulary_is_whole():
    job = make_job("data.path=/corpus", "model.vocab_size=512")
    assert _shrink(job, is_data_there=True).job.data.path == "/corpus"
    assert _shrink(job, is_data_there=False).job.data.path == "synthetic"
    large = make_job("data.path=/corpus", "model.vocab_size=128000", "model.hidden_size=128")
    assert _shrink(large, is_data_there=True).job.data.path == "synthetic"


def test_adam_eps_is_raised_and_said():
    shrunk = _shrink(make_job("optimizer.eps=1e-15"))
    assert shrunk.job.optimizer.eps == 1e-8
    assert any(change.field == "optimizer.eps" for change in shrunk.changes)


def test_what_is_not_tested_is_said():
    gaps = " ".join(_shrink(make_job(file="llama-70b-512gpu.yaml")).untested)
    for part in ("bfloat16", "GPU", "tp2-pp8-dp32 of 512 ranks", "snapshots"):
        assert part in gaps


def test_a_narrower_job_is_as_many_times_as_wide_as_its_mup_base():
    model = make_job(file="llama-70b-512gpu.yaml").model
    job = make_job(f"model.mup_base_width={model.hidden_size // 4}", file="llama-70b-512gpu.yaml")
    small = _shrink(job).job.model
    assert small.hidden_size < model.hidden_size and small.width_ratio == 4


def test_bound_below_the_smallest_model_is_refused_with_its_size():
    with pytest.raises(ConfigError, match=r"--max-params 100; the smallest model .* parameters"):
        _shrink(make_job(), max_params=100)


def test_ramp_and_cooldown_are_kept_but_short():
    job = make_job(
        "data.batch_ramp=[{until_samples: 4000, global_batch_size: 8}]",
        "optimizer.lr_schedule=wsd",
        "optimizer.lr_cooldown_steps=12",
    )
    small = _shrink(job).job
    assert [stage.model_dump() for stage in small.data.batch_ramp] == [
        {"until_samples": 8, "global_batch_size": 8}
    ]
    assert small.optimizer.lr_cooldown_steps == 1
    assert job_faults(job_values(small)) == []


def test_experts_are_fewer_with_their_groups_and_choices_and_some_block_keeps_them():
    moe = {"num_experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "group_score": "top2"}
    values = make_job().model_dump()
    values["model"] |= {
        "num_layers": 61,
        "moe": {**moe, "first_k_dense_replace": 10, "intermediate_size": 32},
    }
    small = _shrink(Job.model_validate(values)).job.model
    assert small.moe.num_experts == 8 and small.moe.n_group == 4 and small.moe.topk_group == 3
    assert small.moe.top_k == 3
    assert any(small.moe.holds_experts(layer) for layer in range(small.num_layers))


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "topk_group"),
    [(11, 2, 1, 1), (13, 4, 1, 1), (22, 2, 1, 1), (257, 8, 1, 1), (121, 1, 1, 1), (9, 2, 3, 2), (77, 3, 7, 2),
     (16, 16, 1, 1)],
)  # fmt: skip
def test_choice_among_any_number_of_experts_stays_a_choice(experts, top_k, groups, topk_group):
    moe = {
        "num_experts": experts, "top_k": top_k, "n_group": groups, "topk_group": topk_group,
        "norm_topk_prob": top_k > 1,
    }  # fmt: skip
    job = make_job(*(f"model.moe.{name}={str(value).lower()}" for name, value in moe.items()))
    shrunk = _shrink(job, max_params=count_parameters(job.model) - 1).job
    small = shrunk.model.moe
    assert not job_faults(job_values(shrunk)) and small.num_experts <= experts
    assert (small.top_k < small.num_experts) == (top_k < experts)
    assert (small.top_k > 1, small.n_group > 1) == (top_k > 1, groups > 1)
    for degree in range(2, 9):
        assert (small.num_experts % degree == 0) == (experts % degree == 0)


BLEND = (
    "data.path=none",
    "data.sources=[{path: /web, weight: 0.6, max_epochs: 1}, {path: /code, weight: 0.4}]",
    "data.stages=[{from_tokens: 1000000, sources: [{path: /code}, {path: /books}]}]",
)


def test_blend_stays_a_blend_of_as_many_datasets_and_changes_while_it_trains():
    small = _shrink(make_job(*BLEND, "data.seq_len=64")).job
    assert not job_faults(job_values(small))
    paths = [[source.path for source in sources] for _, sources in small.data.blends]
    assert paths == [["synthetic:0", "synthetic:1"], ["synthetic:1", "synthetic:2"]]
    assert [source.weight for source in small.data.sources] == [0.6, 0.4]
    (stage,) = small.data.stages
    assert 0 < stage.from_tokens / small.data.seq_len < small.data.global_batch_size


@pytest.mark.parametrize("seed", range(5))
def test_blend_and_stage_are_drawn_for_synthetic_tokens(seed):
    small = _shrink(make_job(), seed=seed).job
    assert not job_faults(job_values(small))
    assert len(small.data.sources) in (2, 3) and len(small.data.stages) == 1
    first = small.data.stages[0].from_tokens // small.data.seq_len
    assert small.data.global_batch_size < first <= 2 * small.data.global_batch_size
    assert small == _shrink(make_job(), seed=seed).job
    # the job's own data are not exchanged
    own = make_job(*BLEND, "data.seq_len=64")
    drawn, same = _shrink(own, seed=seed).job.data, _shrink(own).job.data
    assert (drawn.sources, drawn.stages) == (same.sources, same.stages)
    assert (
        _shrink(make_job("data.path=/web"), is_data_there=True, seed=seed).job.data.path == "/web"
    )


def test_named_validation_sets_stay_and_have_tokens_of_their_own_where_theirs_cannot_be_read():
    words = (
        "data.path=/web",
        "data.validation=[{name: web, path: /web}, {name: code, path: /code, split: train}]",
    )
    small = _shrink(make_job(*words)).job
    assert not job_faults(job_values(small))
    assert [(each.name, each.split) for each in small.data.validation] == [
        ("web", "valid"),
        ("code", "train"),
    ]
    assert len({each.path for each in small.data.validation}) == 2
    assert all(each.path.startswith("synthetic:") for each in small.data.validation)
    there = _shrink(make_job(*words, "model.vocab_size=512"), is_data_there=True).job
    assert [each.path for each in there.data.validation] == ["/web", "/code"]


def test_a_stored_reference_of_other_rows_gives_way_to_a_drawn_one(tmp_path):
    job = make_job(f"data.path={tmp_path}", "data.seq_len=32", "data.packing=best_fit",
                   "preference.loss_type=ipo", "preference.reference=stored")  # fmt: skip
    small = _shrink(job, is_data_there=True).job
    assert small.data.path == "synthetic" and small.preference == job.preference
    samples = open_samples(small)
    row = samples.row(0)
    assert row.num_pairs and row.reference.shape == (2 * row.num_pairs,)
    assert -64 <= row.reference.min() < row.reference.max() <= 0


@pytest.mark.parametrize("loss_on", ["auto", "assistant", "completion"])
def test_pairs_of_synthetic_answers_count_all_labels(loss_on):
    """With labels of the assistant alone many a small batch would have no pair, and the run would end."""
    job = make_job(f"data.loss_on={loss_on}", file="dpo.yaml")
    assert {_shrink(job, seed=seed).job.data.loss_on for seed in range(8)} == {"all"}
