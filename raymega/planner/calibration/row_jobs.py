"""Turn a row of published runs into the jobs that it may describe.

What the row states is kept. What it leaves open, such as the micro-batch size, recompute or
sharding, gives a job for each choice. ``raymega.planner.calibration.row_system`` reads the system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from typing import Any

from raymega.config.schema import Job
from raymega.errors import ConfigError
from raymega.plan.run_plan import RunPlan
from raymega.planner.calibration.known_models import is_gated, known_model
from raymega.planner.calibration.row_system import (
    Facts,
    Row,
    facts_of,
    gpu_of,
    is_fully_sharded,
    is_late,
    software_of,
    words_of,
)

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
OPEN_RECOMPUTES: tuple[str, ...] = ("none", "full")
"""Values of recompute to try where a row does not state it."""
SCHEDULES = {"zb-1p": "zb_h1", "zb-2p": "zb_h2"}
DEFAULT_VOCAB = 51200
DROPOUT = 0.1
"""Dropout rate in Megatron-LM's scripts of before fused attention; memory has to hold its masks and
weights."""
CAPACITY_FACTOR = 1.0
"""Capacity factor of runs with experts: tokens above an expert's share are dropped, or the balance
is forced."""
NEEDED = ("layers", "hidden", "heads", "seq", "n_gpus", "gbs")
COUNTS = (
    *NEEDED, "kv_heads", "ffn", "vocab", "experts", "topk", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "mbs",
)  # fmt: skip
"""Columns of whole numbers from 1 on."""


def completed(row: Row) -> dict[str, str]:
    """Return the row with the sizes that it leaves empty, as far as its model is known by name."""
    known = known_model(row["model"]).sizes
    filled = {name: str(size) for name, size in known.items() if not row.get(name)}
    return {**row, **filled}


def number(row: Row, name: str, default: float = 0.0) -> float:
    """Return a cell as a number, or ``default`` where it is empty.

    Raises:
        ConfigError: The cell is not a number.
    """
    try:
        value = float(row[name]) if row.get(name) else default
    except ValueError:
        value = nan
    if isfinite(value):
        return value
    raise ConfigError(
        fact=f"{row['model']}: {name}={row[name]!r}",
        rule="it must be a number, or empty where the source does not say",
        remedy="correct that cell of the table",
    )


def why_skipped(row: Row) -> str:
    """Return why no job can be made of a row: columns that are missing or contradict; else empty."""
    # Columns that are missing, or that hold no count.
    lacking = [name for name in NEEDED if not row.get(name)]
    if lacking:
        return f"the row does not state {', '.join(lacking)}"
    if not gpu_of(row):
        return f"{row['gpu']} is not in the catalogue"
    wrong = [f"{name}={row[name]}" for name in COUNTS if not 1 <= number(row, name, 1) < 2**53]
    if wrong:
        return f"{', '.join(wrong)}: a count is at least 1"
    # Degrees and batch that contradict the number of GPUs.
    gpus, dp = number(row, "n_gpus"), dp_of(row)
    ranks = dp * number(row, "tp", 1) * number(row, "pp", 1) * number(row, "cp", 1)
    if ranks > gpus:
        return f"tp, pp, cp and dp are {ranks:g} ranks on n_gpus={gpus:g}"
    size = number(row, "mbs")
    if size > -(-number(row, "gbs") // dp):
        return f"mbs={size:g} is more than gbs={row['gbs']} over dp={dp}"
    return ""


def dp_of(row: Row) -> int:
    """Return the data-parallel degree, which follows from the GPUs where a row is silent."""
    others = number(row, "tp", 1) * number(row, "pp", 1) * number(row, "cp", 1)
    return max(1, int(number(row, "dp", number(row, "n_gpus") // others)))


def jobs_of(row: Row) -> Iterator[Job]:
    """Yield each job that the row may describe."""
    facts = facts_of(row)
    for size, recompute, chunks, sharding in product(
        _sizes(row, facts), _recomputes(row, facts), _chunks(row, facts), _shardings(row, facts)
    ):
        yield _job(
            row, facts, sharding=sharding, micro_batch_size=size, recompute=recompute, chunks=chunks
        )


def _sizes(row: Row, facts: Facts) -> tuple[int, ...]:
    sequences = max(1, int(number(row, "gbs") // dp_of(row)))
    stated = int(number(row, "mbs")) or facts.micro_batch or 0
    if not stated and facts.micro_batches == "pp":
        stated = int(sequences // number(row, "pp", 1))
    return (stated,) if stated else tuple(n for n in MICRO_BATCH_SIZES if n <= sequences)


def _recomputes(row: Row, facts: Facts) -> tuple[str, ...]:
    """Return the kinds of recompute; words that are none of them are taken for selective."""
    # The first word counts: tables write "full (inferred)" or "selective op".
    stated = (row["recompute"] or facts.recompute or "").lower().split("(")[0].split()
    if not stated:
        return OPEN_RECOMPUTES
    names = {
        "no": "none",
        "false": "none",
        "off": "none",
        "yes": "full",
        "true": "full",
        "on": "full",
    }
    named = names.get(stated[0], stated[0])
    return (named if named in ("none", "full") else "selective",)


def _chunks(row: Row, facts: Facts) -> tuple[int, ...]:
    layers, pp = int(number(row, "layers")), int(number(row, "pp", 1))
    if row["vpp"] or facts.chunks:
        return (int(number(row, "vpp")) or facts.chunks or 1,)
    if pp == 1 or layers % pp:
        return (1,)
    return tuple(v for v in range(1, layers // pp + 1) if layers // pp % v == 0)


def _shardings(row: Row, facts: Facts) -> tuple[str, ...]:
    """Return levels of sharding with the traffic of the row's system, the likelier first.

    FSDP in a pipeline keeps gathered what the next micro-batch needs again. Its traffic is then
    that of a sharded optimizer. A system that says nothing shards no more than it takes to fit.
    """
    if facts.sharding:
        return (facts.sharding,)
    is_piped = number(row, "pp", 1) > 1
    if is_fully_sharded(row) and not is_piped:
        return ("parameters",)
    stated = "zero" in words_of(row) or is_fully_sharded(row)
    least = ("optimizer",) if stated or software_of(row).hides_gradients else ("none", "optimizer")
    return least if is_piped else (*least, "parameters")


def _job(
    row: Row, facts: Facts, *, sharding: str, micro_batch_size: int, recompute: str, chunks: int
) -> Job:
    tp, cp = int(number(row, "tp", 1)), int(number(row, "cp", 1))
    # Later systems cut the stream where a row is silent.
    cuts_stream = is_late(row) and row["sp"] != "no" and number(row, "seq") % (tp * cp) == 0
    schedule = next((v for k, v in SCHEDULES.items() if k in words_of(row)), "1f1b")
    memory: dict[str, Any] = {"recompute": recompute}
    if recompute == "selective" and facts.selective == "elementwise":
        memory["recompute_parts"] = ("norm", "activation")
    values: dict[str, Any] = {
        # the row's system says what is fused, not raymega's own kernels
        "run": {"name": "published", "steps": 1, "kernels": "eager"},
        "model": _model(row),
        "data": {
            "path": "synthetic",
            "seq_len": int(number(row, "seq")),
            "global_batch_size": int(number(row, "gbs")),
        },
        "parallel": {
            "tp": tp,
            "pp": int(number(row, "pp", 1)),
            "cp": cp,
            "dp": dp_of(row),
            "ep": int(number(row, "ep", 1)),
            "etp": _expert_tensor_parallel(row),
            **({"cp_method": facts.cp_method} if cp > 1 else {}),
            "sequence_parallel": tp > 1 and (row["sp"] == "yes" or cuts_stream),
            "sharding": sharding,
            "stages": "even",
            "is_tp_across_nodes_allowed": True,
        },
        "schedule": {"name": schedule, "chunks": chunks, "micro_batch_size": micro_batch_size},
        "memory": memory,
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bfloat16"},
    }
    return Job.model_validate(values)


def _model(row: Row) -> dict[str, Any]:
    """Return the section ``model``; what the columns lack comes from the model's configuration."""
    # Widths, as far as the columns have them.
    heads, gated, known = int(number(row, "heads")), is_gated(row), known_model(row["model"])
    hidden = int(number(row, "hidden"))
    usual = 256 * round(hidden * 8 / 3 / 256) if gated else 4 * hidden
    ffn, moe = int(number(row, "ffn", usual)), dict(known.moe)
    # Of a known model with experts the column has the experts' width, or that of dense blocks.
    dense = moe.pop("dense", 0)
    if row["experts"]:
        if not row["ffn"] and moe:
            ffn = moe["intermediate_size"]
        width = moe.get("intermediate_size", ffn)
        moe["intermediate_size"] = ffn if ffn != dense else width
        moe |= {
            "num_experts": int(number(row, "experts")),
            "top_k": (top_k := int(number(row, "topk", 2))),
            "norm_topk_prob": top_k > 1,  # a single score divided by itself says nothing
            "capacity_factor": CAPACITY_FACTOR,
        }
    name = words_of(row)
    predicts_further = bool(row["experts"]) and "mtp" in name and "w/o mtp" not in name
    return {
        "family": "llama" if gated else "gpt2",
        "num_layers": int(number(row, "layers")),
        "hidden_size": hidden,
        "num_heads": heads,
        # GPT-3 13B has 40 heads of 128 in a width of 5140.
        **({"head_dim": hidden // heads} if hidden % heads else {}),
        **({} if "mla" in known.model else {"num_kv_heads": int(number(row, "kv_heads", heads))}),
        "ffn_hidden_size": dense or ffn,
        "vocab_size": int(number(row, "vocab", DEFAULT_VOCAB)),
        "make_vocab_size_divisible_by": 128 * int(number(row, "tp", 1)),
        "max_positions": int(number(row, "seq")),
        # Later systems untie embeddings.
        "tie_word_embeddings": not gated and not is_late(row),
        "moe": moe if row["experts"] else {},
        **({"num_nextn_predict_layers": 1} if predicts_further else {}),
        **known.model,
    }


def _expert_tensor_parallel(row: Row) -> int:
    """Return the expert tensor-parallel degree.

    Where a row is silent, experts on ep ranks are cut by tp as attention is, as all were before
    parallel folding, if the ranks of a pipeline rank hold both. Other experts are not cut.
    """
    tp, ep = number(row, "tp", 1), number(row, "ep", 1)
    ranks = tp * number(row, "cp", 1) * dp_of(row)
    is_cut = bool(row["experts"]) and ep > 1 and "folding]" not in words_of(row)
    return int(number(row, "etp", tp if is_cut and ranks % (tp * ep) == 0 else 1))


def with_dropout(plan: RunPlan, row: Row) -> RunPlan:
    """Return the plan with dropout where attention is not fused.

    Such systems kept the attention weights, their masks and those of the residual stream. The rates
    are set after planning, because a job of this size would be refused with them.
    """
    if software_of(row).has_fused_attention:
        return plan
    rates = {"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT}
    return replace(plan, job=plan.job.with_values(model=rates))


def noted(row: Mapping[str, str], name: str) -> float:
    """Return the figure that the note gives as ``name=figure``, or 0."""
    for part in row["note"].replace(",", ";").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 0.0
