"""Whether a run can start with a checkpoint's weights, asked before anything starts."""

import shutil
from dataclasses import replace
from typing import get_args

import pytest

from raymega.api import load_job
from raymega.checkpoint.format.keys import ROOT
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.load.init_from import resume_faults, start_faults, starting_manifest
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.attention import (
    AttentionSection,
    LayerSizesSection,
    LinearAttentionSection,
    MultipliersSection,
)
from raymega.config.encoder import EncoderDecoderSection, EncoderSection
from raymega.config.heads.section import HeadSection
from raymega.config.schema import (
    CheckpointSection,
    FunctionField,
    MlaSection,
    ModelSection,
    MoeSection,
)
from raymega.config.vision.section import VisionSection
from raymega.convert.huggingface.importer import hf_import
from raymega.errors import ConfigError
from raymega.plan.init_from_rules import is_reinitialised
from raymega.storage.registry import open_store
from tests.support.jobs import VERIFY
from tests.unit.convert.folders import NOW, make_model, write_folder


@pytest.fixture
def imported(tmp_path):
    folder = write_folder(tmp_path / "theirs", make_model(tie_word_embeddings=False))
    return hf_import(folder, str(tmp_path / "ours"), created=NOW, make_vocab_size_divisible_by=8)


def _start(uri, model, **rules) -> list:
    return start_faults(CheckpointSection(init_from=uri, **rules), model)


def _changed(model: ModelSection, **changes) -> ModelSection:
    return model.model_copy(update=changes)


def test_same_model_has_no_faults(imported):
    assert _start(imported.uri, imported.model) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"num_layers": 3}, "layers.2.attention_norm.weight as nothing instead of (16,)"),
        ({"num_layers": 1}, "layers.1.attention.k.weight, which this model lacks"),
        ({"ffn_hidden_size": 32}, "mlp.gate.weight as (24, 16) instead of (32, 16)"),
        ({"num_heads": 2, "num_kv_heads": 1}, "was made with model.num_heads=4, not 2"),
        ({"vocab_size": 51}, "was made with model.vocab_size=50, not 51"),
        ({"norm_eps": 1e-3}, "not 0.001"),
        ({"rope_theta": 5e5}, "was made with model.rope_theta=10000.0, not 500000.0"),
        ({"rope_scaling": "llama3"}, "was made with model.rope_scaling=none, not llama3"),
    ],
    ids=["deeper", "shallower", "wider", "heads", "padding", "norms", "waves", "scaling"],
)
def test_other_model_is_refused(imported, change, fact):
    (fault,) = _start(imported.uri, _changed(imported.model, **change))
    assert fact in str(fault) and "checkpoint.init_from=" in str(fault)


def test_what_the_weights_do_not_fix_may_change(imported):
    changes = {"hidden_dropout": 0.1, "z_loss": 0.1, "max_positions": 24}
    assert _start(imported.uri, _changed(imported.model, **changes)) == []


def test_what_the_run_changes_on_purpose_is_named(imported):
    longer = _changed(imported.model, rope_theta=5e5, norm_eps=1e-3)
    (fault,) = _start(imported.uri, longer, allow_changed=("rope_theta",))
    assert "model.norm_eps" in fault.fact and "allow_changed=[norm_eps]" in fault.remedy
    assert _start(imported.uri, longer, allow_changed=("rope_theta", "norm_eps")) == []


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"attention": AttentionSection(layer_types=("full", "full"))}, ""),
        ({"attention": AttentionSection(layer_types=("full", "no_positions"))}, "layer_types=['full'], not"),
        ({"head_dim": 4, "layer_sizes": LayerSizesSection(num_heads=(4, 4, 4))}, ""),
        ({"head_dim": 4, "layer_sizes": LayerSizesSection(num_heads=(4,), num_kv_heads=(2,))}, ""),
    ],
    ids=["types", "other-types", "sizes", "kv-sizes"],
)  # fmt: skip
def test_lists_by_layer_are_compared_layer_by_layer(imported, changes, fact):
    found = _start(imported.uri, _changed(imported.model, **changes))
    assert fact in str(found[0]) if fact else found == []


def test_a_new_head_pools_as_its_job_says(imported):
    rules = {"reinit": ("head.score.*",), "init_ignore": ("head.weight",)}
    head = HeadSection(kind="regression", pooling="mean")
    assert _start(imported.uri, _changed(imported.model, head=head), **rules) == []


def test_every_field_that_changes_the_function_but_no_shape_is_watched():
    """Nothing new in the model section may slip by: shapes, the function, or neither."""
    shapes = {"num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size",
              "vocab_size", "make_vocab_size_divisible_by", "tie_word_embeddings", "max_positions",
              "moe.num_experts", "moe.intermediate_size", "moe.layer_freq", "moe.first_k_dense_replace",
              "num_nextn_predict_layers", *(f"mla.{field}" for field in MlaSection.model_fields),
              "moe.shared_expert_intermediate_size", "moe.shared_expert_gate", "moe.expert_bias",
              *(f"linear_attention.{field}" for field in LinearAttentionSection.model_fields if field != "time_step_min"),
              "attention.sinks", *(f"encoder.{field}" for field in EncoderSection.model_fields),
              "encoder_decoder.num_encoder_layers", "encoder_decoder.relative_attention_num_buckets",
              "head.kind", "head.num_labels", "head.num_choices", "vision.kind", "vision.image_size", "vision.patch_size",
              "vision.min_pixels", "vision.max_pixels",
              "vision.num_layers", "vision.hidden_size", "vision.num_heads", "vision.ffn_hidden_size",
              "vision.spatial_merge_size", *(f"layer_sizes.{field}" for field in LayerSizesSection.model_fields)}  # fmt: skip
    training = {"initializer_range", "hidden_dropout", "attention_dropout", "label_smoothing", "z_loss", "loss",
                "mtp_loss_scaling_factor", "freeze", "train", "neftune_noise_alpha",
                "moe.router_jitter_noise", "moe.router_dtype", "moe.load_balancing_type", "moe.router_aux_loss_coef",
                "moe.sinkhorn_rounds", "moe.expert_bias_update_rate", "moe.router_z_loss_coef",
                "moe.pad_expert_input_to_capacity", "encoder_decoder.decoder_seq_len", "head.temperature", "head.normalize",
                "vision.initializer_range", "vision.image_share", "vision.mean_pixels",
                "vision.tensor_parallel"}  # fmt: skip
    sections = {"moe": MoeSection, "mla": MlaSection, "attention": AttentionSection}
    sections |= {"multipliers": MultipliersSection, "encoder": EncoderSection, "head": HeadSection}
    sections |= {
        "linear_attention": LinearAttentionSection,
        "encoder_decoder": EncoderDecoderSection,
        "vision": VisionSection,
        "layer_sizes": LayerSizesSection,
    }
    # what starts has no adapter yet
    fields = set(ModelSection.model_fields) - sections.keys() - {"lora"}
    for name, section in sections.items():
        fields |= {f"{name}.{field}" for field in section.model_fields}
    others = fields - shapes - training
    assert others == set(get_args(FunctionField))


def test_rules_say_what_belongs_where(imported):
    """A deeper model of another vocabulary: the new layer and the tables begin fresh."""
    deeper = _changed(imported.model, num_layers=3, vocab_size=51, tie_word_embeddings=True)
    fresh = ("layers.2.*", "embedding.tokens.weight")
    assert _start(imported.uri, deeper, reinit=fresh, init_ignore=("head.*",)) == []
    (fault,) = _start(imported.uri, deeper, reinit=fresh)
    assert "head.weight, which this model lacks" in str(fault)
    shallower = _changed(imported.model, num_layers=1)
    assert _start(imported.uri, shallower, init_ignore=("layers.1.*",)) == []
    last = ("layers.1=layers.0",)
    assert _start(imported.uri, shallower, init_ignore=("layers.0.*",), init_rename=last) == []


@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        ({"init_ignore": ("layer.1.*",)}, "init_ignore has 'layer.1.*', which fits no tensor"),
        ({"reinit": ("haed.*",)}, "reinit has 'haed.*', which fits no tensor of this model"),
        ({"init_rename": ("norm=final_norm",)}, "init_rename has 'norm=final_norm', which fits no"),
        (
            {"init_rename": ("layers.*.mlp.up=layers.*.mlp.gate", "layers.0.mlp=layers.0.mlp")},
            "layers.0.mlp.gate.weight and layers.0.mlp.up.weight are both layers.0.mlp.gate.weight",
        ),
    ],
    ids=["ignore", "reinit", "rename", "two sources"],
)
def test_rules_that_are_mistakes_are_refused(imported, rules, fact):
    assert fact in str(_start(imported.uri, imported.model, **rules)[0])


def test_fields_that_shapes_do_not_tell_matter_only_for_what_is_taken(imported):
    other = _changed(imported.model, num_heads=2, num_kv_heads=1, vocab_size=51)
    facts = list(map(str, _start(imported.uri, other)))
    assert len(facts) == 2
    assert len(_start(imported.uri, other, reinit=("layers.*.attention.*",))) == 1
    fresh = ("layers.*.attention.*", "embedding.*", "head.*")
    assert _start(imported.uri, other, reinit=fresh) == []


def test_experts_begin_as_the_dense_layer_or_parts_of_it_where_the_job_says_so(imported):
    moe = MoeSection(num_experts=4, intermediate_size=12, first_k_dense_replace=1)
    upcycled = _changed(imported.model, moe=moe)
    assert _start(imported.uri, upcycled, init_upcycle=True) == []
    biased = _changed(
        upcycled, moe=moe.model_copy(update={"expert_bias": True, "load_balancing_type": "global"})
    )
    assert _start(imported.uri, biased, init_upcycle=True) == [], (
        "no tensor of a router has a source"
    )
    assert "layers.1.mlp.down.weight, which this model" in str(_start(imported.uri, upcycled)[0])
    (fault,) = _start(imported.uri, imported.model, init_upcycle=True)
    assert "here is no block that has experts and was dense" in str(fault)
    shared = _changed(upcycled, moe=moe.model_copy(update={"shared_expert_intermediate_size": 8}))
    (fault,) = _start(imported.uri, shared, init_upcycle=True)
    assert "layers.1.moe.shared.gate.weight as nothing" in str(fault)
    fresh = ("layers.*.moe.shared.*",)
    assert _start(imported.uri, shared, init_upcycle=True, reinit=fresh) == []


def test_load_of_the_last_step_is_left_behind(imported):
    """It is the other run's; a job that balances by it begins with none."""
    _, manifest = open_checkpoint(imported.uri)
    counts = "layers.1.moe.router.counts"
    box = replace(manifest.boxes[0], tensor=f"model/{counts}")
    began = starting_manifest(
        replace(manifest, boxes=(*manifest.boxes, box)),
        CheckpointSection(init_from=imported.uri),
        imported.model,
    )
    assert began.boxes == manifest.boxes
    assert is_reinitialised(CheckpointSection(init_from=imported.uri), counts)


def test_start_holds_what_is_renamed_and_nothing_else(imported):
    _, manifest = open_checkpoint(imported.uri)
    section = CheckpointSection(
        init_from=imported.uri,
        init_rename=("layers.1=layers.0",),
        init_ignore=("layers.0.*", "head.*"),
    )
    began = starting_manifest(manifest, section, _changed(imported.model, num_layers=1))
    assert {box.tensor for box in began.boxes if "layers" in box.tensor} == {
        box.tensor for box in manifest.boxes if "layers.0." in box.tensor
    }
    assert {box.file for box in began.boxes} == {box.file for box in manifest.boxes}
    assert "model/head.weight" not in began.tensors()


@pytest.mark.parametrize(
    "override",
    [
        "init_rename=[a=b]",
        "reinit=[head.*]",
        "init_ignore=[head.*]",
        "allow_changed=[norm_eps]",
        "init_upcycle=true",
    ],
)
def test_rules_without_a_start_are_refused(override):
    with pytest.raises(ConfigError, match="init_from is none"):
        load_job(VERIFY, [f"checkpoint.{override}"])


def test_run_of_another_model_is_refused_before_it_goes_on(tmp_path, imported):
    shutil.copytree(imported.uri, tmp_path / "runs" / "verify")
    with pytest.raises(ConfigError, match=r"manifest-a0000.json holds .* instead of") as caught:
        load_job(VERIFY, [f"checkpoint.uri={tmp_path / 'runs'}"], is_for_training=True)
    assert "begin another run with --set run.name=NAME" in str(caught.value)


def test_run_of_another_model_is_told_field_by_field(imported):
    store, _ = open_checkpoint(imported.uri)
    with_experts = _changed(imported.model, moe=MoeSection(num_experts=4, intermediate_size=16))
    (fault,) = resume_faults(store, with_experts, micro_batch_size=1)
    assert fault.fact.startswith("model.moe.num_experts=4, model.moe.intermediate_size=16: ")
    assert "{" not in fault.fact and ",," not in fault.fact


def test_other_micro_batches_are_refused_where_routing_goes_by_them(imported):
    store, manifest = open_checkpoint(imported.uri)
    store.delete(manifest.key)
    commit(store, replace(manifest, job=manifest.job | {"schedule": {"micro_batch_size": 2}}))
    by_token, by_micro = (
        _changed(imported.model, moe=MoeSection(load_balancing_type=balance))
        for balance in ("global", "micro_batch")
    )
    assert not list(resume_faults(store, by_token, micro_batch_size=4))
    assert not list(resume_faults(store, by_micro, micro_batch_size=2))
    (fault,) = resume_faults(store, by_micro, micro_batch_size=4)
    assert "schedule.micro_batch_size=4: the run has trained with 2 up to step 0" in fault.fact
    assert "set schedule.micro_batch_size=2" in fault.remedy


def test_other_micro_batches_are_refused_where_scales_are_of_their_tensors(imported):
    store, manifest = open_checkpoint(imported.uri)
    store.delete(manifest.key)
    sections = {"schedule": {"micro_batch_size": 2}, "precision": {"fp8": "tensorwise"}}
    commit(store, replace(manifest, job=manifest.job | sections))
    assert not list(resume_faults(store, imported.model, micro_batch_size=4, fp8="rowwise"))
    assert not list(resume_faults(store, imported.model, micro_batch_size=2, fp8="tensorwise"))
    (fault,) = resume_faults(store, imported.model, micro_batch_size=4, fp8="tensorwise")
    assert (
        "with precision.fp8=tensorwise each scale is of a tensor of one micro-batch" in fault.rule
    )


def test_missing_files_are_told(imported):
    store = open_store(imported.uri)
    (data,) = [key for key in store.list(ROOT) if key.endswith(".safetensors")]
    store.delete(data)
    (fault,) = _start(imported.uri, imported.model)
    assert f"{data} is missing" in str(fault)


def test_job_with_a_start_that_is_none_is_refused_before_it_runs(tmp_path):
    override = f"checkpoint.init_from={tmp_path / 'nothing'}"
    root = f"checkpoint.uri={tmp_path / 'runs'}"
    with pytest.raises(ConfigError, match=r"init_from=.*there is no checkpoint at") as caught:
        load_job(VERIFY, [override, root], is_for_training=True)
    (fault,) = caught.value.faults
    assert str(fault).count("; ") == 2, "one fact, one rule, one remedy"
    assert not (tmp_path / "runs").exists()


def test_run_with_checkpoints_of_its_own_needs_its_start_no_more(tmp_path):
    """It is resumed from its own, so the source may be gone."""
    root = tmp_path / "runs"
    folder = write_folder(tmp_path / "theirs", make_model(vocab_size=64))
    imported = hf_import(folder, str(tmp_path / "ours"), created=NOW)
    shutil.copytree(imported.uri, root / "verify")
    model = imported.model.model_dump(mode="json")
    overrides = [f"model.{name}={value}" for name, value in model.items()]
    overrides += [
        f"checkpoint.init_from={tmp_path / 'gone'}", f"checkpoint.uri={root}", "data.seq_len=8",
        "parallel.pp=1",
    ]  # fmt: skip
    assert load_job(VERIFY, overrides, is_for_training=True).run.name == "verify"
