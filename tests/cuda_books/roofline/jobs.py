"""Jobs of the roofline, without torch: Llama 2 at 7B and 70B, and Mixtral 8x7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymega.config.load import parse_mapping
from raymega.plan.run_plan import RunPlan, make_plan
from tests.cuda_books.layouts import BASE, LLAMA_7B

RUN = {"name": "roofline", "steps": 1000000, "eval_samples": 2}
LLAMA_70B = {
    **LLAMA_7B, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_hidden_size": 28672,
}  # fmt: skip
MIXTRAL = {
    **LLAMA_7B, "num_kv_heads": 8, "ffn_hidden_size": 14336, "rope_theta": 1e6,
    "moe": {
        "num_experts": 8, "top_k": 2, "load_balancing_type": "micro_batch", "router_aux_loss_coef": 0.02,
    },
}  # fmt: skip


def _job(model: Mapping[str, Any], layers: int, batch: int, **sections: Any) -> dict[str, Any]:
    """Return a job of ``batch`` sequences of 4096 tokens a step."""
    return {
        **BASE, "run": RUN, "model": {**model, "num_layers": layers}, **sections,
        "data": {"path": "synthetic", "seq_len": 4096, "global_batch_size": batch},
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "llama 7B, tp1 dp8": _job(LLAMA_7B, 32, 64, parallel={"dp": 8, "sharding": "optimizer"}),
    "llama 7B, tp8 sp": _job(LLAMA_7B, 32, 8, parallel={"tp": 8, "sequence_parallel": True}),
    # as in jobs/mixtral-8x7b-64gpu.yaml
    "mixtral 8x7B, pp2 dp32 ep8": _job(
        MIXTRAL, 32, 1024,
        parallel={"pp": 2, "dp": 32, "ep": 8, "sharding": "optimizer", "stages": "auto"},
        schedule={"name": "zb_v", "chunks": 2},
    ),
    "llama 70B, tp8 sp pp4 dp2": _job(
        LLAMA_70B, 80, 64,
        parallel={"tp": 8, "pp": 4, "dp": 2, "sequence_parallel": True, "sharding": "optimizer"},
    ),
}  # fmt: skip


def plan_of(name: str, *, num_layers: int | None = None) -> RunPlan:
    """Return the plan of a case, or of one with another number of layers.

    A name may end with ``, kernels=eager`` or another value of that field.
    """
    name, _, kernels = name.partition(", kernels=")
    job = CASES[name]
    run = job["run"] | ({"kernels": kernels} if kernels else {})
    parallel = job["parallel"]
    ranks = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    model = job["model"] | ({} if num_layers is None else {"num_layers": num_layers})
    cluster = {**job["cluster"], "num_workers": ranks}
    return make_plan(parse_mapping({**job, "run": run, "model": model, "cluster": cluster}).job())


def busiest_rank(plan: RunPlan) -> int:
    """Return a rank of the last stage, which has the head."""
    ranks = range(plan.grid.world_size)
    return next(r for r in ranks if any(stage.is_last for stage in plan.stages_of(r)))
