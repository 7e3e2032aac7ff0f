"""Read published runs of other systems as jobs, to compare them with predictions.

``raymega plan --runs`` does so. The module reads the columns of a table and fills in what a source
leaves open. It fits nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, PlanError, one_line
from raymega.plan.flops import flops_per_token
from raymega.plan.fp8_layers import ALL_IN_EIGHT, NONE_IN_EIGHT, Fp8Coverage
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.kernels.system_traits import Software

COLUMNS = (
    "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "experts", "topk",
    "gpu", "n_gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "gbs", "mbs", "precision", "recompute", "sp",
    "tflops_per_gpu", "iter_s", "note",
)  # fmt: skip
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
OPEN_RECOMPUTES: tuple[str, ...] = ("none", "full")
"""Values of recompute to try where a row does not state it."""
SCHEDULES = {"ZB-1p": "zb_h1", "ZB-2p": "zb_h2"}
DEFAULT_VOCAB = 51200
DROPOUT = 0.1
"""Dropout rate in Megatron-LM's scripts of that time; memory has to hold its masks and weights."""
GATED = ("llama", "mixtral", "qwen", "deepseek")
SHARED_WIDTHS = {"Qwen2-57B-A14B": 20480}
"""Width of the expert that sees every token, from the model's public configuration."""
COUNTS_WHOLE_SQUARE = ("MoE-Parallel-Folding", "NeMo docs performance_long_sequence")
"""Sources without a step time that count attention's FLOPs without a causal mask, as Megatron-LM
did."""
PRINTS_FAILURES = ("MoE-Parallel-Folding",)
"""Sources that print runs out of memory, and so did not fall back on full recompute."""
ONE_SEQUENCE = ("MoE-Parallel-Folding",)
"""Sources whose micro-batches have one sequence where their table does not state it, from the authors'
benchmark files (Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf)."""
CAPACITY_FACTOR = 1.0
"""Capacity factor of the runs with experts: tokens above an expert's share are dropped."""
OUT_OF_MEMORY = "RESULT=OOM"

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """Row of the table, with the plans that it may have run.

    Attributes:
        source: Publication that printed the run.
        model: Name of the model in the source.
        gpu: Catalogue name of the run's device.
        num_gpus: Number of GPUs of the whole run.
        candidates: Plans that agree with everything the row states; several where it leaves the
            micro-batch size, the chunks or recompute open.
        software: Traits of the training system.
        fp8_coverage: Matrix products that run in fp8.
        iter_s: Published seconds of a step, or for some sources those that follow from the FLOP/s;
            0 without either.
        tflops: Published FLOP/s of a GPU in units of 1e12, by the source's own count; 0 for none.
        memory_gib: Published peak of the allocator in units of 2**30, whatever the source calls
            them; 0 when it printed none.
        reserved_gib: Published peak of the memory that the allocator reserved, in use or not, in
            the same units; 0 when the source printed none.
        is_out_of_memory: Whether the run was tried and did not fit.
        skipped: Reason why the row cannot be expressed as a job; empty when it can.
    """

    source: str
    model: str
    gpu: str
    num_gpus: int
    candidates: tuple[RunPlan, ...]
    software: Software
    fp8_coverage: Fp8Coverage
    iter_s: float
    tflops: float
    memory_gib: float
    reserved_gib: float = 0.0
    is_out_of_memory: bool = False
    skipped: str = ""


def read_runs(path: Path | str) -> Iterator[PublishedRun]:
    """Yield every row of a table with the columns of ``benchmarks/published_runs.csv``.

    Raises:
        ConfigError: The file cannot be read, lacks a column, or has a cell that is not a number.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_table_fault(path, f"cannot be read ({error})")) from None
    rows = csv.DictReader(StringIO(text, newline=""))
    lacking = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if lacking:
        raise ConfigError(_table_fault(path, f"lacks the columns {', '.join(lacking)}"))
    for row in rows:
        yield published_run({name: row[name] or "" for name in COLUMNS})


def _table_fault(path: Path | str, what: str) -> Fault:
    return Fault(
        fact=f"the table of runs '{path}' {what}",
        rule="it is a .csv file with the columns of benchmarks/published_runs.csv",
        remedy="give that file, or one with the same header",
    )


def published_run(row: Row) -> PublishedRun:
    """Return a row as a run with its plans; ``skipped`` gives the reason when it has none."""
    candidates: tuple[RunPlan, ...] = ()
    skipped = _not_expressible(row)
    if not skipped:
        try:
            candidates = tuple(_with_dropout(make_plan(job), row) for job in _jobs(row))
        except (PlanError, ValueError) as error:
            skipped = one_line(error)
    return PublishedRun(
        source=row["source"],
        model=row["model"],
        gpu=_gpu(row),
        num_gpus=int(_number(row, "n_gpus")),
        candidates=candidates,
        software=_software(row),
        fp8_coverage=ALL_IN_EIGHT if "fp8" in row["precision"] else NONE_IN_EIGHT,
        iter_s=_number(row, "iter_s") or _derived_s(row, candidates),
        tflops=_number(row, "tflops_per_gpu"),
        memory_gib=0.0 if _is_torchtitan(row) else _printed_gib(row),
        reserved_gib=_printed_gib(row) if _is_torchtitan(row) else 0.0,
        is_out_of_memory=OUT_OF_MEMORY in row["note"],
        skipped=skipped,
    )


def _derived_s(row: Row, candidates: tuple[RunPlan, ...]) -> float:
    """Return the seconds of a step that follow from the FLOP/s that the source printed, or 0."""
    tflops = _number(row, "tflops_per_gpu")
    if not tflops or not candidates or not row["source"].startswith(COUNTS_WHOLE_SQUARE):
        return 0.0
    job = candidates[0].job
    # Twice the length: these sources count the whole [S, S] square.
    per_token = flops_per_token(job.model, seq_len=2 * job.data.seq_len)
    tokens = job.data.global_batch_size * job.data.seq_len
    return per_token * tokens / _number(row, "n_gpus") / tflops / 1e12


def _not_expressible(row: Row) -> str:
    needed = ("layers", "hidden", "heads", "seq", "n_gpus", "gbs")
    lacking = [name for name in needed if not row[name]]
    if lacking:
        return f"the row does not state {', '.join(lacking)}"
    if not _gpu(row):
        return f"{row['gpu']} is not in the catalogue"
    return ""


def _sharding(row: Row) -> str:
    """Return the level of sharding that has the traffic of the row's system.

    FSDP in a pipeline keeps gathered what the next micro-batch needs again. Its traffic is then
    that of a sharded optimizer (torchtitan, reshard_after_forward).
    """
    if _is_fully_sharded(row) and _number(row, "pp", 1) == 1:
        return "parameters"
    return "optimizer" if _software(row).hides_gradients else "none"


def _is_fully_sharded(row: Row) -> bool:
    return any(name in row["model"] + row["note"] for name in ("ZeRO-3", "FSDP"))


def _jobs(row: Row) -> Iterator[Job]:
    """Yield each job that the row may describe."""
    sequences = _number(row, "gbs") / _dp(row)
    stated = _number(row, "mbs")
    if not stated and row["source"].startswith(ONE_SEQUENCE):
        stated = 1
    if not stated and _is_torchtitan(row):
        stated = sequences // _number(row, "pp", 1)  # pipeline_parallel_microbatches is pp then
    sizes = (int(stated),) if stated else MICRO_BATCH_SIZES
    recomputes = OPEN_RECOMPUTES
    if row["recompute"]:
        recomputes = (row["recompute"].split("(")[0].split()[0],)
    elif row["source"].startswith(PRINTS_FAILURES):
        recomputes = ("none",)
    layers, pp = int(_number(row, "layers")), int(_number(row, "pp", 1))
    chunks: tuple[int, ...] = (int(_number(row, "vpp", 1)),)
    if not row["vpp"] and layers % pp == 0 and pp > 1:
        chunks = tuple(v for v in range(1, layers // pp + 1) if layers // pp % v == 0)
    if _is_torchtitan(row) and "interleaved" in row["note"]:
        chunks = (2,)  # stages of a rank in its looped schedules
    for size, recompute, v in product(sizes, recomputes, chunks):
        if size <= sequences:
            yield _job(row, micro_batch_size=size, recompute=recompute, chunks=v)


def _job(row: Row, *, micro_batch_size: int, recompute: str, chunks: int) -> Job:
    heads, tp = int(_number(row, "heads")), int(_number(row, "tp", 1))
    is_gated = any(name in row["model"].lower() for name in GATED)
    vocab = int(_number(row, "vocab", DEFAULT_VOCAB))
    # Later systems untie embeddings, and cut the stream where a row is silent.
    is_late = _software(row).has_fused_attention
    values: dict[str, Any] = {
        "run": {"name": "published", "steps": 1},
        "model": {
            "family": "llama" if is_gated else "gpt2",
            "num_layers": int(_number(row, "layers")),
            "hidden_size": int(_number(row, "hidden")),
            "num_heads": heads,
            "num_kv_heads": int(_number(row, "kv_heads", heads)),
            "ffn_hidden_size": int(_number(row, "ffn", 4 * _number(row, "hidden"))),
            "vocab_size": vocab,
            "make_vocab_size_divisible_by": 128 * tp,
            "max_positions": int(_number(row, "seq")),
            "tie_word_embeddings": not is_gated and not is_late,
            "moe": _experts(row),
        },
        "data": {
            "path": "synthetic",
            "seq_len": int(_number(row, "seq")),
            "global_batch_size": int(_number(row, "gbs")),
        },
        "parallel": {
            "tp": tp,
            "pp": int(_number(row, "pp", 1)),
            "cp": int(_number(row, "cp", 1)),
            "dp": _dp(row),
            "ep": int(_number(row, "ep", 1)),
            "etp": _expert_width(row),
            **_context_method(row),
            "sequence_parallel": tp > 1 and (row["sp"] == "yes" or (is_late and row["sp"] != "no")),
            "sharding": _sharding(row),
            "stages": "even",
        },
        "schedule": {
            "name": next((v for k, v in SCHEDULES.items() if k in row["model"]), "1f1b"),
            "chunks": chunks,
            "micro_batch_size": micro_batch_size,
        },
        "memory": _memory(row, recompute),
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bfloat16"},
    }
    return Job.model_validate(values)


def _expert_width(row: Row) -> int:
    """Return the expert tensor-parallel degree.

    Where a row is silent, experts on ep ranks are cut by tp as attention is, as all were before
    parallel folding. Other experts are not cut.
    """
    is_cut = bool(row["experts"]) and _number(row, "ep", 1) > 1 and "Folding]" not in row["model"]
    return int(_number(row, "etp", _number(row, "tp", 1) if is_cut else 1))


def _memory(row: Row, recompute: str) -> dict[str, Any]:
    """Return the fields of the section ``memory``.

    Selective recompute is that of attention. In torchtitan it keeps the results of products and of
    attention, and recomputes norms and nonlinearities.
    """
    if recompute == "selective" and _is_torchtitan(row):
        return {"recompute": recompute, "recompute_parts": ("norm", "activation")}
    return {"recompute": recompute}


def _context_method(row: Row) -> dict[str, str]:
    """Return the method of context parallelism.

    torchtitan gathers keys and values; all others are taken to send them around a ring.
    """
    gathers = _is_torchtitan(row) and _number(row, "cp", 1) > 1
    return {"cp_method": "all_gather"} if gathers else {}


def _is_torchtitan(row: Row) -> bool:
    return row["source"].startswith("torchtitan")


def _experts(row: Row) -> dict[str, Any]:
    if not row["experts"]:
        return {}
    name = row["model"].split(" [")[0]
    return {
        "num_experts": int(_number(row, "experts")),
        "top_k": int(_number(row, "topk", 1)),
        "capacity_factor": CAPACITY_FACTOR,
        "shared_expert_intermediate_size": SHARED_WIDTHS.get(name, 0),
    }


def _with_dropout(plan: RunPlan, row: Row) -> RunPlan:
    """Return the plan with dropout where attention is not fused.

    Such systems kept the attention weights, their masks and those of the residual stream. The rates
    are set after planning, because a job of this size would be refused with them.
    """
    if _software(row).has_fused_attention:
        return plan
    rates = {"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT}
    return replace(plan, job=plan.job.with_values(model=rates))


def _software(row: Row) -> Software:
    """Return the traits of the row's system, by its number format.

    float16 is how Megatron-LM trained before fused attention, and before gradients and weights were
    sent concurrently with computation. bfloat16 and fp8 came with both.
    """
    if "bf16" not in row["precision"] and "fp8" not in row["precision"]:
        return Software(
            has_fused_attention=False,
            gradient_bytes=2,
            hides_gradients=False,
            gathers_tensors=_is_fully_sharded(row),
            hides_messages=False,
            has_dropout=True,
            # Qi et al. 2023, section 4: validated afterwards, and rolled back if needed.
            waits_for_update=not row["source"].startswith("ZeroBubble"),
        )
    if _is_torchtitan(row):
        return Software(
            has_newest_attention=False,
            fuses_kernels="compile" in row["note"] or "fp8" in row["precision"],
            remakes="products" if "fp8" in row["precision"] else "every_second",
        )
    return Software()


def _gpu(row: Row) -> str:
    named = [name for name in CATALOGUE if name in row["gpu"].lower()]
    return max(named, key=len, default="")


def _dp(row: Row) -> int:
    others = _number(row, "tp", 1) * _number(row, "pp", 1) * _number(row, "cp", 1)
    return int(_number(row, "dp", _number(row, "n_gpus") // others))


def _number(row: Row, name: str, default: float = 0.0) -> float:
    try:
        return float(row[name]) if row[name] else default
    except ValueError:
        raise ConfigError(
            fact=f"{row['model']}: {name}={row[name]!r}",
            rule="it must be a number, or empty where the source does not say",
            remedy="correct that cell of the table",
        ) from None


def _printed_gib(row: Row) -> float:
    return _noted(row, "mem_gib") or _noted(row, "mem_gb")


def _noted(row: Row, name: str) -> float:
    """Return the figure that the note gives as ``name=figure``, or 0."""
    for part in row["note"].replace(",", ";").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return float(value)
    return 0.0
