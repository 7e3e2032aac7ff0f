"""Command `raymega checkpoint merge`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from raymega.cli.options import AsJson
from raymega.cli.output import json_object, print_json
from raymega.convert.tuned.adapted_weights import CombinationType
from raymega.convert.tuned.merge import merge
from raymega.errors import counted


def merge_(
    uris: Annotated[list[str], typer.Argument(metavar="URI..")],
    out: str,
    base: Annotated[str, typer.Option(metavar="URI")] = "",
    dtype: str = "saved",
    weights: Annotated[list[float] | None, typer.Option("--weight")] = None,
    combination_type: Annotated[CombinationType | None, typer.Option()] = None,
    is_average: Annotated[bool, typer.Option("--ema")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge adapters into their base, average the weights of several checkpoints, or take a run's moving average.

    The result holds weights alone, as an imported model does: it can be evaluated, exported, and started from.

    Options:
        uris: Checkpoints with adapters of one base, or several without (of a run, its newest).
        out: Output folder or s3://bucket/prefix.
        base: Weights that the adapters change; default: those that their run started from.
        dtype: Number format of the result: saved, float64, float32, bfloat16 or float16.
        weights: Share of each checkpoint in the mean, or factor on what each adapter adds, in their order; default: 1.
        combination_type: Write one adapter in place of whole weights: cat, which adds what all add, or linear (PEFT).
        is_average: Read the moving averages that runs with optimizer.ema_decay keep, in place of the weights.

    Example: raymega checkpoint merge ~/.raymega/runs/tuned --out merged
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done = merge(
        uris,
        out,
        created=created,
        base=base,
        dtype=dtype,
        weights=weights or (),
        is_average=is_average,
        combination_type=combination_type or "",
    )
    if as_json:
        print_json(json_object(done, uri="output", key="manifest"))
        return
    what = (
        f"adapters of {counted(done.num_adapters, 'layer')} merged"
        if done.num_adapters
        else f"mean of {counted(len(done.sources), 'checkpoint')}"
    )
    print(f"{done.uri}/{done.key}: {what}, {done.num_parameters:,} parameters in {done.dtype}")
