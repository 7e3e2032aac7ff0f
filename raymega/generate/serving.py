"""Lines that serve an exported model by an engine: vLLM, SGLang, or Ray Serve with a file of `cluster/`."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.grid_text import degrees_of, grid_overrides
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.generate.exported import (
    default_folder,
    keep_export,
    model_name,
    one_device_plan,
)

PORT = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Program that serves a folder which transformers loads.

    Attributes:
        words: Function from folder, model name and port to the command's words; `--tensor-parallel-size N` may follow.
        module: Module of the program, which tells whether it is installed.
        install: Line that installs it.
    """

    words: Callable[[Path, str, int], list[str]]
    module: str
    install: str


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        words=lambda folder, name, port: [
            "vllm", "serve", str(folder), "--served-model-name", name, "--port", str(port),
        ],
        module="vllm",
        install="pip install vllm",
    ),
    "sglang": Engine(
        words=lambda folder, name, port: [
            "python", "-m", "sglang.launch_server", "--model-path", str(folder),
            "--served-model-name", name, "--port", str(port),
        ],
        module="sglang",
        install="pip install sglang",
    ),
}  # fmt: skip


def serving_words(engine: str, folder: Path, *, name: str, port: int, grid: str = "") -> list[str]:
    """Return the words of the command that serves ``folder``, on tp GPUs where ``grid`` says so.

    Raises:
        ConfigError: There is no such engine, or the grid has other axes than tp.
    """
    if engine not in ENGINES:
        rule = f"an engine is one of {', '.join(ENGINES)}"
        raise ConfigError(fact=f"--engine {engine}", rule=rule, remedy="give --engine vllm")
    others = [text for text in grid_overrides(grid) if not text.startswith("parallel.tp=")]
    if others:
        raise ConfigError(
            fact=f"--serve --grid {grid}",
            rule="an engine cuts the model by tensor parallelism alone: the grid is tp",
            remedy="give --grid tp=2, for example, or leave --grid out for one GPU",
        )
    tp = degrees_of(grid)["tp"]
    more = ["--tensor-parallel-size", str(tp)] if tp > 1 else []
    return [*ENGINES[engine].words(folder, name, port), *more]


def serving_line(  # noqa: PLR0913  # the options of the command
    uri: str,
    *,
    engine: str = "vllm",
    port: int = PORT,
    grid: str = "",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    starts: bool = False,
) -> list[str]:
    """Export the newest checkpoint that ``uri`` names; return the words of the command that serves it.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        engine: Name of an engine.
        port: Port of the server.
        grid: Degree of tensor parallelism, such as ``tp=2``; empty is one GPU.
        folder: Folder of the export; None is one below ~/.raymega/exports.
        overrides: Texts ``section.field=value``; ``precision.dtype`` is the export's number format.
        starts: True if the line is to be run: the engine must be installed.

    Raises:
        ConfigError: The checkpoint, the engine or the grid is wrong, or the engine is not installed.
    """
    serving_words(engine, Path(), name="", port=port, grid=grid)  # refuses what it cannot serve
    raise_faults(ConfigError, absence_faults(engine) if starts else [])
    checkpoint = open_checkpoint(uri)
    plan = one_device_plan(checkpoint, overrides)
    dtype = plan.job.precision.dtype
    place = folder or default_folder(checkpoint, dtype=dtype)
    keep_export(checkpoint, dtype=dtype, folder=place, base=plan.job.checkpoint.init_from)
    return serving_words(engine, place, name=model_name(checkpoint), port=port, grid=grid)


def absence_faults(engine: str) -> list[Fault]:
    """Return the fault of an engine that is not installed here."""
    program = ENGINES[engine]
    if find_spec(program.module) or (engine == "vllm" and shutil.which("vllm")):
        return []
    return [
        Fault(
            fact=f"--start: the package {program.module} is not installed here",
            rule=f"--engine {engine} runs it",
            remedy=f"run `{program.install}`, or leave --start out to print the line alone",
        )
    ]


def as_line(words: list[str]) -> str:
    """Return the words as a line to paste."""
    return shlex.join(words)
