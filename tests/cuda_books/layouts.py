"""Jobs whose rank 0 runs on the device that executes nothing: each axis, schedule and kind of state at least once."""

from __future__ import annotations

from typing import Any

LLAMA_7B = {
    "family": "llama", "num_layers": 4, "hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 11008,
    "vocab_size": 32000, "max_positions": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 2 7B's layers, of which few are enough to count them."""
BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "books", "steps": 1000000, "eval_samples": 0},
    "model": LLAMA_7B,
    "data": {"path": "synthetic", "seq_len": 4096, "global_batch_size": 2},
    "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
    "precision": {"dtype": "bfloat16"},
    "cluster": {"device": "cuda"},
}
_EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 2048}
_CP4 = {"cp": 4}


def _pipeline(schedule: str, **more: Any) -> dict[str, Any]:
    chunks = {"interleaved": 2, "zb_v": 2, "dualpipe_v": 2}.get(schedule, 1)
    return {
        "parallel": {"tp": 4, "pp": 2, "dp": 2},
        "data": {"global_batch_size": 8},
        "schedule": {"name": schedule, "chunks": chunks, **more},
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp8 sp": {"parallel": {"tp": 8, "sequence_parallel": True}},
    **{
        f"dp8 sharding {level}": {
            "parallel": {"dp": 8, "sharding": level}, "data": {"global_batch_size": 16},
        }
        for level in ("none", "optimizer", "gradients", "parameters")
    },
    "dp8 hybrid": {
        "parallel": {"dp": 8, "sharding": "parameters", "data_parallel_shard_degree": 4},
        "data": {"global_batch_size": 16},
    },
    "cp4 ring": {"parallel": {**_CP4, "cp_method": "ring"}},
    "cp4 all_gather": {"parallel": {**_CP4, "cp_method": "all_gather"}},
    "cp4 all_to_all": {"parallel": {**_CP4, "cp_method": "all_to_all"}},
    "cp4 hybrid": {"parallel": {**_CP4, "cp_method": "hybrid", "hierarchical_cp_size": 2}},
    "ep4": {"model": {**LLAMA_7B, "moe": _EXPERTS}, "parallel": {"dp": 4, "ep": 4}, "data": {"global_batch_size": 8}},
    "ep4 shared expert": {
        "model": {**LLAMA_7B, "moe": {**_EXPERTS, "shared_expert_intermediate_size": 2048}},
        "parallel": {"dp": 4, "ep": 4},
        "data": {"global_batch_size": 8},
    },
    "recompute full": {"memory": {"recompute": "full"}},
    "offload activations": {"memory": {"offload": ("activations",)}},
    "offload optimizer": {"memory": {"offload": ("optimizer",)}},
    "deterministic": {
        "run": {"deterministic": True},
        "model": {**LLAMA_7B, "moe": {**_EXPERTS, "shared_expert_intermediate_size": 2048}},
        "parallel": {"dp": 4, "ep": 4},
        "data": {"global_batch_size": 8},
    },
    "tp4 pp2 dp2 gpipe": _pipeline("gpipe"),
    "tp4 pp2 dp2 1f1b": _pipeline("1f1b"),
}  # fmt: skip


def job_of(name: str, *, num_layers: int | None = None) -> dict[str, Any]:
    """Return the job of a layout as a mapping, with as many workers as its grid asks for."""
    own = LAYOUTS[name]
    job = {section: {**BASE.get(section, {}), **own.get(section, {})} for section in {*BASE, *own}}
    parallel = own.get("parallel", {})
    ranks = 1
    for axis in ("tp", "pp", "dp", "cp"):
        ranks *= parallel.get(axis, 1)
    job["cluster"] = {**job["cluster"], "num_workers": ranks}
    if num_layers is not None:
        job["model"] = {**job["model"], "num_layers": num_layers}
    return job
