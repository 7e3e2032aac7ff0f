"""Rows of a run in Weights & Biases, written by its own package; offline, into files for ``wandb sync``.

Each driver writes a folder of its own with the same run id, so the server shows one run. Only the sink's
thread imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import wandb
from wandb.proto import wandb_internal_pb2

from raymega.events import RunStarted
from raymega.tracking.trackers.series import Row
from raymega.tracking.trackers.wandb_file import read_records

Mode = Literal["online", "offline"]


class WandbRows:
    """RowStore of Weights & Biases: a row of history for each step."""

    def __init__(self, folder: Path, *, project: str, mode: Mode) -> None:
        """Write below ``folder``/wandb, into ``project``."""
        self._folder, self._project, self._mode = folder, project, mode
        self._step = 0
        self._run: Any = None  # Any: wandb's class is typed loosely

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each metric in the files of earlier drivers; remove files without one."""
        found: dict[str, int] = {}
        decode: Any = wandb_internal_pb2.Record.FromString  # type: ignore[attr-defined]  # generated
        for path in sorted(self._folder.glob("wandb/*run-[0-9]*/*.wandb")):
            records = list(read_records(path))
            # A driver killed in its first moments; `wandb sync` would refuse all folders for it.
            if not records:
                rmtree(path.parent)
            for data in records:
                history = decode(data).history
                for item in history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        found[name] = max(history.step.num, found.get(name, -1))
        return found

    def open(self, event: RunStarted) -> None:
        """Begin a folder of the run, without wandb's own prints, console capture and system metrics."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            id=event.run_id,
            name=event.name,
            config=dict(event.job),
            dir=str(self._folder),
            mode=self._mode,
            # Offline `wandb sync` reads it, and appends this driver's rows to the others'.
            resume="allow",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Log the rows; a value that comes late has the newest step, as wandb's steps only rise."""
        for row in rows:
            self._step = max(self._step, row.step)
            self._run.log(dict(row.metrics), step=self._step)

    def close(self, *, has_failed: bool) -> None:
        """Finish the run of this driver."""
        self._run.finish(exit_code=int(has_failed))
