"""Read published runs of other systems as plans, to compare them with predictions.

``raymega plan --runs`` does so. ``raymega.planner.calibration.row_jobs`` makes the jobs of a row,
``raymega.planner.calibration.row_system`` reads its system. The module fits nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from raymega.errors import ConfigError, Fault, PlanError, one_line
from raymega.plan.flops import flops_per_token
from raymega.plan.fp8_layers import (
    ALL_IN_EIGHT,
    BY_ROW_IN_EIGHT,
    NONE_IN_EIGHT,
    Fp8Coverage,
)
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.calibration.row_jobs import (
    completed,
    jobs_of,
    noted,
    number,
    why_skipped,
    with_dropout,
)
from raymega.planner.calibration.row_system import (
    Format,
    Row,
    device_of,
    facts_of,
    format_of,
    gpu_of,
    is_fully_sharded,
    software_of,
)
from raymega.planner.kernels.system_traits import Software

COLUMNS = (
    "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "experts", "topk",
    "gpu", "n_gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "gbs", "mbs", "precision", "recompute", "sp",
    "tflops_per_gpu", "iter_s", "note",
)  # fmt: skip
MORE_COLUMNS = ("params_b", "facts")
"""Columns that a table may lack."""
OUT_OF_MEMORY = "RESULT=OOM"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """Row of the table, with the plans that it may have run.

    Attributes:
        source: Publication that printed the run.
        model: Name of the model in the source.
        gpu: Catalogue name of the run's device; empty for one that it lacks.
        device: Device with the memory and network that the row states; None without ``gpu``.
        number_format: Format of most products.
        num_gpus: Number of GPUs of the whole run.
        candidates: Plans that agree with everything the row states; several where it leaves
            something open. None where the row is skipped.
        software: Traits of the training system.
        fp8_coverage: Matrix products that run in fp8, or in fp4.
        iter_s: Published seconds of a step, or those that follow from the FLOP/s; 0 without either.
        tflops: Published FLOP/s of a GPU in units of 1e12, by the source's own count; 0 for none.
        memory_gib: Published peak of the allocator in units of 2**30, whatever the source calls
            them; 0 when it printed none.
        reserved_gib: Published peak of the memory that the allocator reserved, in use or not, in
            the same units; 0 when the source printed none.
        is_out_of_memory: Whether the run was tried and did not fit.
        is_fully_sharded: Whether the row says that parameters are sharded.
        has_open_recompute: Whether the row leaves open what is recomputed.
        skipped: Reason why the row cannot be expressed as a job; empty when it can.
    """

    source: str
    model: str
    gpu: str
    device: Accelerator | None
    number_format: Format
    num_gpus: int
    candidates: tuple[RunPlan, ...]
    software: Software
    fp8_coverage: Fp8Coverage
    iter_s: float
    tflops: float
    memory_gib: float
    reserved_gib: float = 0.0
    is_out_of_memory: bool = False
    is_fully_sharded: bool = False
    has_open_recompute: bool = False
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
        cells = {name: (row.get(name) or "").strip() for name in COLUMNS + MORE_COLUMNS}
        yield published_run(cells)


def _table_fault(path: Path | str, what: str) -> Fault:
    return Fault(
        fact=f"the table of runs '{path}' {what}",
        rule="it is a .csv file with the columns of benchmarks/published_runs.csv",
        remedy="give that file, or one with the same header",
    )


def published_run(row: Row) -> PublishedRun:
    """Return a row as a run with its plans; ``skipped`` gives the reason when it has none."""
    # Plans of the row, with what its model's name adds.
    row = completed(row)
    candidates, skipped = _candidates(row)
    # Figures that the source printed.
    peak = noted(row, "mem_gib") or noted(row, "mem_gb")
    is_reserved = facts_of(row).memory == "reserved"
    number_format = format_of(row)
    return PublishedRun(
        source=row["source"],
        model=row["model"],
        gpu=gpu_of(row),
        device=device_of(row),
        number_format=number_format,
        num_gpus=int(number(row, "n_gpus")),
        candidates=candidates,
        software=software_of(row),
        fp8_coverage=_coverage(row),
        iter_s=number(row, "iter_s") or _derived_s(row, candidates),
        tflops=number(row, "tflops_per_gpu"),
        memory_gib=0.0 if is_reserved else peak,
        reserved_gib=peak if is_reserved else 0.0,
        is_out_of_memory=OUT_OF_MEMORY in row["note"],
        is_fully_sharded=is_fully_sharded(row),
        has_open_recompute=not row["recompute"],
        skipped=skipped,
    )


def _coverage(row: Row) -> Fp8Coverage:
    """Return the products in a narrow format; scales by row leave weight gradients wide."""
    if format_of(row) == "16-bit":
        return NONE_IN_EIGHT
    return BY_ROW_IN_EIGHT if "row" in row["precision"].lower() else ALL_IN_EIGHT


def _candidates(row: Row) -> tuple[tuple[RunPlan, ...], str]:
    """Return the plans of a row, or the reason why it has none.

    A choice for what the row leaves open may break a rule that another one keeps.
    """
    skipped = why_skipped(row)
    if skipped:
        return (), skipped
    found: list[RunPlan] = []
    try:
        for job in jobs_of(row):
            try:
                found.append(with_dropout(make_plan(job), row))
            except PlanError as error:
                skipped = skipped or one_line(error)
    except ValueError as error:  # a value that no job may have
        return (), one_line(error)
    return tuple(found), "" if found else skipped or "no plan agrees with its columns"


def _derived_s(row: Row, candidates: tuple[RunPlan, ...]) -> float:
    """Return the seconds of a step that follow from the FLOP/s that the source printed, or 0.

    Where it is not known how the source counts, none follow.
    """
    tflops = number(row, "tflops_per_gpu")
    if not tflops or not candidates or facts_of(row).flops != "square":
        return 0.0
    job = candidates[0].job
    # Twice the length: such a count takes attention without a causal mask.
    per_token = flops_per_token(job.model, seq_len=2 * job.data.seq_len)
    tokens = job.data.global_batch_size * job.data.seq_len
    return per_token * tokens / number(row, "n_gpus") / tflops / 1e12
