"""Table of the commands, each of which is imported when it is first used.

`raymega --help` and a command then load what they show or do, and nothing of the others: Ray alone takes half a
second to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from raymega.cli.options import add_command

COMMANDS = {
    "init": ("raymega.cli.init.command:init", "Write a commented job file that plans as it stands, on the grid that the planner recommends."),
    "train": ("raymega.cli.train:train", "Run a job; the same run name continues the same run."),
    "submit": ("raymega.cli.submit:submit", "Submit a job to a cluster; the same run name continues the same run."),
    "runs": ("raymega.cli.runs:runs", "List the runs of a store or folder, newest first: state, step, loss, time and place."),
    "doctor": ("raymega.cli.doctor:doctor", "Check a cluster's resources, versions, GPUs and clocks; with a job, also its store and bandwidth."),
    "plan": ("raymega.cli.plan.command:plan", "Show a job's grid, stages, batch, schedule, parameters, state bytes and activations."),
    "verify": ("raymega.cli.verify:verify", "Check that this job trains the same on random parallel layouts as on one rank."),
    "chaos": ("raymega.cli.chaos:chaos", "Train a job twice, undisturbed and under injected faults, and compare the two runs."),
    "schedule": ("raymega.cli.schedule:schedule", "Show bubble, peak activations and timeline of a pipeline schedule (forward 1, backward 2 units)."),
    "report": ("raymega.cli.report:report", "Write a run's page: curves, speed, memory by rank against the plan, experts, incidents, settings."),
    "schema": ("raymega.cli.schema:schema", "Print the JSON schema of job files."),
    "node-agent": ("raymega.cli.node_agent:node_agent", "Drain this node when its cloud preempts it, so that runs save and leave it in time."),
    "eval": ("raymega.cli.evaluate:evaluate", "Evaluate checkpoints on a task, on any grid, whatever grid they were trained on."),
    "generate": ("raymega.cli.generate:generate", "Continue prompts by a checkpoint, whatever grid it was trained on."),
    "data": ("raymega.cli.data.command:data_app", "Curate, prepare, inspect and export datasets."),
    "checkpoint": ("raymega.cli.checkpoint.command:checkpoint_app", "Inspect, compare, copy, merge and prune checkpoints in any store."),
    "convert": ("raymega.cli.convert:convert_app", "Import and export Hugging Face, torch.distributed.checkpoint and PEFT models."),
}  # fmt: skip
"""Module and name of each command's function, or group of commands, and the first line of its help."""


class LazyCommands(Mapping[str, Any]):
    """Commands by name, imported at the first access to each."""

    def __getitem__(self, name: str) -> Any:
        """Return the command; KeyError for an unknown name."""
        return load_command(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the help."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """Group of the commands in COMMANDS, which knows names and first lines without importing any."""

    def __init__(self, **settings: Any) -> None:
        """Begin as typer does, with the commands of the table."""
        super().__init__(**settings)
        self.commands = LazyCommands()  # type: ignore[assignment]  # a dict that is filled by need

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # typer's
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # typer's
        """Return a stand-in with the name and the first line of the help; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and remaining words, with the command in place of its stand-in."""
        name, command, words = super().resolve_command(ctx, args)
        return name, command and self.commands[str(command.name)], words


@cache
def load_command(name: str) -> Any:
    """Import the command ``name`` of the table, and build it; KeyError for an unknown name."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        add_command(app, found, name=name)
        return typer.main.get_command(app)
    command = typer.main.get_command(found)
    command.name = name
    return command
