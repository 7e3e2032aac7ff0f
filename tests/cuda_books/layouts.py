"""Jobs of which one rank runs on the device that executes nothing: each axis, schedule and kind of state at least once."""

from __future__ import annotations

from typing import Any

from raymega.schedule.table import SCHEDULES

LLAMA_7B = {
    "family": "llama", "num_layers": 4, "hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 11008,
    "vocab_size": 32000, "max_positions": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 2 7B's layers, of which few are enough to count them."""
BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "books", "steps": 1000000, "eval_samples": 2, "kernels": "eager"},
    "model": LLAMA_7B,
    "data": {"path": "synthetic", "seq_len": 4096, "global_batch_size": 2},
    "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
    "precision": {"dtype": "bfloat16"},
    "checkpoint": {"every": 0},
    "cluster": {"device": "cuda"},
}
EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 2048}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 2048}
MLA = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
GPT2 = {
    "family": "gpt2", "num_layers": 4, "hidden_size": 1600, "num_heads": 25, "ffn_hidden_size": 6400,
    "vocab_size": 50257, "max_positions": 1024,
}  # fmt: skip
PACKED = {"packing": "best_fit", "packing_window": 256}
Layout = dict[str, dict[str, Any]]


def _model(**values: Any) -> dict[str, Any]:
    return {**LLAMA_7B, **values}


def _on(batch: int, **parallel: Any) -> Layout:
    """Return the grid ``parallel`` with ``batch`` sequences a step."""
    return {"parallel": parallel, "data": {"global_batch_size": batch}}


def _pipeline(schedule: str) -> Layout:
    chunks = max(2 if schedule == "interleaved" else 1, SCHEDULES[schedule].least_chunks)
    return {
        **_on(8, tp=4, pp=2, dp=2), "schedule": {"name": schedule, "chunks": chunks},
    }  # fmt: skip


LAYOUTS: dict[str, Layout] = {
    # one rank: kernels, formats, families, memory
    "one rank": {},
    "compiled": {"run": {"kernels": "compile"}},
    "float16": {"precision": {"dtype": "float16"}},
    "fp8 rowwise": {"precision": {"fp8": "rowwise"}},
    "fp8 tensorwise": {"precision": {"fp8": "tensorwise"}},
    "gpt2": {"model": GPT2, "data": {"seq_len": 1024}},
    "mla": {"model": _model(mla=MLA)},
    "mtp": {"model": _model(num_nextn_predict_layers=1)},
    "muon": {"optimizer": {"name": "muon"}},
    "8bit state": {"optimizer": {"state_dtype": "8bit"}},
    "recompute full": {"memory": {"recompute": "full"}},
    "recompute selective": {
        "memory": {"recompute": "selective", "recompute_parts": ("attention", "activation", "norm")},
    },
    "offload activations": {"memory": {"offload": ("activations",)}},
    "offload optimizer": {"memory": {"offload": ("optimizer",)}},
    "packed": {"data": PACKED},
    # tensor parallel
    "tp8 sp": {"parallel": {"tp": 8, "sequence_parallel": True}},
    "tp8 sp compiled": {
        "parallel": {"tp": 8, "sequence_parallel": True}, "run": {"kernels": "compile"},
    },
    "tp8 sp pp2": _on(8, tp=8, pp=2, sequence_parallel=True),
    "tp8 sp fp8": {
        "parallel": {"tp": 8, "sequence_parallel": True}, "precision": {"fp8": "tensorwise"},
    },
    # data parallel
    **{
        f"dp8 sharding {level}": _on(16, dp=8, sharding=level)
        for level in ("none", "optimizer", "gradients", "parameters")
    },
    "dp8 hybrid": _on(16, dp=8, sharding="parameters", data_parallel_shard_degree=4),
    "dp64 hybrid": {
        **_on(128, dp=64, sharding="parameters", data_parallel_shard_degree=8),
        "elastic": {"snapshot_every": 1},
    },
    "dp8 muon": {**_on(16, dp=8, sharding="optimizer"), "optimizer": {"name": "muon"}},
    "dp64 offload": {
        **_on(128, dp=64, sharding="parameters"), "memory": {"offload": ("activations", "optimizer")},
    },
    "dp64 deterministic": {**_on(128, dp=64, sharding="optimizer"), "run": {"deterministic": True}},
    # context parallel
    **{f"cp4 {method}": {"parallel": {"cp": 4, "cp_method": method}} for method in ("ring", "all_gather", "all_to_all")},
    "cp4 hybrid": {"parallel": {"cp": 4, "cp_method": "hybrid", "hierarchical_cp_size": 2}},
    "cp2 packed": {"parallel": {"cp": 2}, "data": {**PACKED, "document_multiple": 4}},
    "dynamic cp": {
        "parallel": {"dp": 2, "cp": 2, "dynamic_cp": True},
        "data": {**PACKED, "document_multiple": 4, "global_batch_size": 4},
        "run": {"seed": 12},  # the counted step has a pack of four ranks, and one of two that is full
    },
    # experts
    "ep4": {**_on(8, dp=4, ep=4), "model": _model(moe=EXPERTS)},
    "ep4 shared expert": {**_on(8, dp=4, ep=4), "model": _model(moe=SHARED)},
    "ep4 gathered": {
        **_on(8, dp=4, ep=4, moe_token_dispatcher_type="all_gather"), "model": _model(moe=EXPERTS),
    },
    "ep4 padded": {
        **_on(8, dp=4, ep=4),
        "model": _model(moe={**EXPERTS, "capacity_factor": 1.0, "pad_expert_input_to_capacity": True}),
    },
    "ep4 fp8": {**_on(8, dp=4, ep=4), "model": _model(moe=EXPERTS), "precision": {"fp8": "rowwise"}},
    "ep4 compiled": {**_on(8, dp=4, ep=4), "model": _model(moe=SHARED), "run": {"kernels": "compile"}},
    "ep4 overlap": {
        **_on(8, dp=4, ep=4, overlap_moe_expert_parallel_comm=True), "model": _model(moe=SHARED),
    },
    "ep4 deterministic": {
        **_on(8, dp=4, ep=4), "model": _model(moe=SHARED), "run": {"deterministic": True},
    },
    "ep4 etp2 folded": {
        **_on(8, tp=4, cp=2, dp=2, ep=4, etp=2, sequence_parallel=True, sharding="optimizer"),
        "model": _model(moe=SHARED),
    },
    "ep2 pp2 overlap dualpipe_v": {
        **_on(8, pp=2, dp=2, ep=2, overlap_moe_expert_parallel_comm=True),
        "model": _model(moe=SHARED),
        "schedule": {"name": "dualpipe_v", "chunks": 2},
    },
    "deepseek": {
        **_on(16, tp=2, pp=2, dp=4, ep=4, sequence_parallel=True, sharding="optimizer"),
        "model": _model(mla=MLA, moe=SHARED, num_nextn_predict_layers=1),
        "precision": {"fp8": "rowwise"},
    },
    # pipeline parallel
    **{f"tp4 pp2 dp2 {name}": _pipeline(name) for name in SCHEDULES},
    "tp4 pp2 dp2 1f1b last stage": _pipeline("1f1b"),
    "pp4 interleaved sharded": {
        **_on(16, pp=4, dp=2, sharding="parameters"),
        "model": _model(num_layers=8),
        "schedule": {"name": "interleaved", "chunks": 2},
    },
    "gpt2 pp2 tied": {
        **_on(8, tp=2, pp=2, dp=2),
        "model": {**GPT2, "num_heads": 20}, "data": {"seq_len": 1024, "global_batch_size": 8},
    },
}  # fmt: skip
WITHOUT_SAVE = frozenset({"offload optimizer"})
"""Layouts that are not saved: the whole state is on the host already, and 12 GiB of it would really be copied."""
READS = frozenset(
    {
        "one rank",
        "recompute full",
        "tp8 sp",
        "tp4 pp2 dp2 1f1b last stage",
        "dp64 hybrid",
        "cp4 ring",
        "ep4",
    }
)
"""Layouts that also score requests and continue prompts."""
OFF_PLAN: dict[str, frozenset[str]] = {
    "8bit state": frozenset({"state"}),
    "dp8 muon": frozenset({"state", "pinned"}),
}
"""Layouts of which `raymega plan` misses the state or pinned memory; their budgets hold each error in bytes."""
RANKS = {"tp4 pp2 dp2 1f1b last stage": 8}
"""Layouts of which another rank than 0 runs."""


def rank_of(name: str) -> int:
    """Return the rank of a layout that runs."""
    return RANKS.get(name, 0)


def job_of(name: str, *, num_layers: int | None = None) -> dict[str, Any]:
    """Return the job of a layout as a mapping, with as many workers as its grid asks for."""
    own = LAYOUTS[name]
    job = {section: {**BASE.get(section, {}), **own.get(section, {})} for section in {*BASE, *own}}
    parallel = own.get("parallel", {})
    ranks = 1
    for axis in ("tp", "pp", "dp", "cp"):
        ranks *= parallel.get(axis, 1)
    job["cluster"] = {**job["cluster"], "num_workers": ranks}
    job["run"] = {**job["run"], "eval_samples": 2 * parallel.get("dp", 1)}
    if num_layers is not None:
        job["model"] = {**job["model"], "num_layers": num_layers}
    return job
