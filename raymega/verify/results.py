"""Result files of ranks: numbers of a finished rank, traceback of a failed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raymega.box import Box
from raymega.verify.compare import ComparedBlock, RankResult, StepValues


def result_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's numbers."""
    return folder / f"rank{rank}.npz"


def failure_path(folder: Path, rank: int) -> Path:
    """Return the path of a failed rank's traceback; its last line names the error."""
    return folder / f"rank{rank}.failure"


def read_result(folder: Path, rank: int) -> RankResult:
    """Return the result of rank ``rank``; its blocks are read from the file at each iteration."""
    path = result_path(folder, rank)
    with np.load(path) as arrays:
        index: dict[str, Any] = json.loads(str(arrays["index"]))
    return RankResult(
        first_step=index["first_step"],
        manifest=index.get("manifest", ""),
        curve=tuple(StepValues(**values) for values in index["curve"]),
        blocks=_Blocks(path=path, index=index["blocks"]),
        eval_losses=index["eval_losses"],
        plain_eval_losses=index["plain_eval_losses"],
        lr_scales=index["lr_scales"],
        router_margin=index["router_margin"],
        fp8_margin=index["fp8_margin"],
    )


def read_eval_losses(folder: Path, rank: int) -> dict[str, float]:
    """Return the numbers of a rank that evaluated only."""
    with np.load(result_path(folder, rank)) as arrays:
        losses: dict[str, float] = json.loads(str(arrays["index"]))["eval_losses"]
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    path: Path
    index: list[dict[str, Any]]

    def __iter__(self) -> Iterator[ComparedBlock]:
        with np.load(self.path) as arrays:
            # npz arrays load lazily: one block is in memory at a time
            for place, entry in enumerate(self.index):
                box = {key: tuple(numbers) for key, numbers in entry["box"].items()}
                yield ComparedBlock(
                    step=entry["step"],
                    name=entry["name"],
                    box=Box(**box),
                    values=arrays[str(place)],
                )
