"""Command `raymega generate`: continues prompts by a checkpoint, or prints the line that serves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import Address, AsJsonLines, Overrides, Uri
from raymega.cli.output import print_json
from raymega.cli.progress import phase_bars
from raymega.errors import counted
from raymega.generate.run import BATCH_SIZE, Answer, GenerateOptions, Prompts
from raymega.generate.run import generate as run_generate
from raymega.generate.serving import ENGINES, PORT, as_line, serving_line
from raymega.plan.sampling import Sampling

Engine = Annotated[str, typer.Option(metavar="NAME", help=f"Engine: {', '.join(ENGINES)}.")]


def generate(  # the options of the command
    uri: Uri,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT")] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    chat: Annotated[Path | None, typer.Option(metavar="FILE.json")] = None,
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE")] = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT")] = None,
    seed: int = 0,
    grid: str = "",
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = BATCH_SIZE,
    serve: Annotated[bool, typer.Option("--serve")] = False,
    start: Annotated[bool, typer.Option("--start")] = False,
    engine: Engine = "vllm",
    port: Annotated[int, typer.Option(min=1, max=65535)] = PORT,
    address: Address = "auto",
    as_json: AsJsonLines = False,
) -> None:
    """Continue prompts by a checkpoint, whatever grid it was trained on.

    Without --grid the checkpoint is exported, and transformers generates on one device. With --grid each
    token takes a full forward pass on that grid.

    Options:
        prompt: Prompt, repeatable.
        file: File of prompts, one a line; a .jsonl file has objects with `prompt`, and `images` if it has marks.
        chat: File of a chat, a JSON list of messages with role and content; or one chat a line.
        image: Image of a mark <image> in --prompt, repeatable, in order; --file and --chat name their own.
        max_tokens: Largest number of new tokens.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to choose from; 0 is all.
        top_p: Share of probability to choose from.
        stop: Text before which an answer ends, repeatable.
        seed: Seed of the random numbers; the same seed gives the same text on every grid.
        grid: Parallel degrees: --grid tp=2,pp=2; with --serve the engine's tensor parallelism, --grid tp=2.
        folder: Folder of the exported model, which is kept and used again.
        batch_size: Number of prompts at once, without --grid.
        serve: Export the model, and print the line that serves it.
        start: With --serve: run the line.
        port: Port of the server.

    Example: raymega generate my-out/runs/my-run --prompt 'Once upon a time' --temperature 0.8
    """
    if serve or start:
        words = serving_line(
            uri, engine=engine, port=port, grid=grid, folder=folder, overrides=overrides or (), starts=start,
        )  # fmt: skip
        print(as_line(words), flush=True)
        if start:
            os.execvp(words[0], words)  # the engine takes this process's place
        return
    options = GenerateOptions(
        sampling=Sampling(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            stop=tuple(stop or ()), seed=seed,
        ),
        grid=grid,
        overrides=tuple(overrides or ()),
        folder=folder,
        batch_size=batch_size,
    )  # fmt: skip
    prompts = Prompts(texts=tuple(prompt or ()), file=file, chat=chat, images=tuple(image or ()))
    with phase_bars() as on_progress:
        answers = run_generate(uri, prompts, options=options, address=address, on_count=on_progress)
    for answer in answers:
        if as_json:
            print_json(answer)
        else:
            _show(answer)


def _show(answer: Answer) -> None:
    """Print an answer behind its prompt."""
    print(f"{answer.prompt}{answer.text}")
    print(f"-- {counted(len(answer.tokens), 'token')}, {answer.finish_reason}")
