"""Command `raymega init`: writes a commented job file for a kind of training, from flags or questions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import typer

from raymega.cli.init.job_text import SCHEMA_FILE, schema_text
from raymega.cli.init.new_job import CPU_PROCESSES, GPU, Answers, as_word, new_job
from raymega.cli.init.recipes import RECIPES
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.hardware.catalog import CATALOGUE

Ask = Callable[[str, Any], Any]
"""Function that asks a question and returns the answer, of the type of the second argument, its default."""
_RECIPES = "; ".join(f"{each.name}: {each.summary}" for each in RECIPES.values())
_GPU = f"Accelerator of each worker: {', '.join(CATALOGUE)}, or a YAML file; default: {GPU}."


def init(
    recipe: Annotated[
        str,
        typer.Argument(help=f"Kind of training. {_RECIPES}.", autocompletion=lambda: list(RECIPES)),
    ] = "",
    model: str = "",
    gpus: Annotated[int | None, typer.Option()] = None,
    gpu: Annotated[str, typer.Option(help=_GPU)] = "",
    data: str = "",
    teacher: str = "",
    out: Annotated[Path | None, typer.Option(metavar="JOB.yaml")] = None,
) -> None:
    """Write a commented job file that plans as it stands, on the grid that the planner recommends.

    On a terminal the command asks for what is not given.

    Options:
        model: Model to begin with: a folder of Hugging Face (config.json is enough) or a checkpoint.
        gpus: Number of GPUs; without it two CPU processes, or eight of --gpu.
        data: Dataset that `raymega data prepare` wrote; without it built-in tokens.
        teacher: Of distill: the larger model to learn from, a folder or a checkpoint.
        out: File to write; default: the recipe's name.

    Example: raymega init continue --model Llama-3.2-1B/ --gpus 8 --out my-job.yaml
    """
    raise_faults(ConfigError, _count_faults(gpus))
    is_asking = sys.stdin.isatty() and sys.stdout.isatty()
    answers = Answers(
        recipe=recipe, model=model, gpus=gpus or 0, gpu=gpu, data=data,
        teacher=teacher, out=out or Path(),
    )  # fmt: skip
    if is_asking:
        answers = asked(answers, _ask, is_count_known=gpus is not None or bool(gpu))
    if out is None:
        answers = replace(answers, out=Path(f"{answers.recipe}.yaml"))
    raise_faults(ConfigError, _faults(answers))
    made = new_job(answers)
    _write(answers.out, made.text)
    print(f"{answers.out}: {made.choice.reasons[0]}")
    print(f"{answers.out.with_name(SCHEMA_FILE)}: JSON schema, which editors read")
    print("next:")
    job_file = as_word(answers.out)
    for line in (*made.before, f"raymega plan {job_file}", f"raymega train {job_file}"):
        print(f"  {line}")


def asked(answers: Answers, ask: Ask, *, is_count_known: bool) -> Answers:
    """Return the answers with those that were missing, as ``ask`` gets them."""
    is_interview = not answers.recipe
    recipe = answers.recipe or ask(f"Recipe ({_RECIPES})", "pretrain")
    answers = replace(answers, recipe=recipe)
    found = RECIPES.get(recipe)
    if not answers.model and found and (found.needs_model or is_interview):
        text = "Model: a folder of Hugging Face or a checkpoint"
        answers = replace(
            answers, model=ask(text if found.needs_model else f"{text}; empty: a small one", "")
        )
    if recipe == "distill" and not answers.teacher:
        text = "Teacher: a folder of Hugging Face or a checkpoint"
        answers = replace(answers, teacher=ask(text, ""))
    if not is_count_known:
        text = f"Number of GPUs; 0: {CPU_PROCESSES} CPU processes"
        answers = replace(answers, gpus=ask(text, 0))
        raise_faults(ConfigError, _count_faults(answers.gpus or None))
        if answers.gpus:
            answers = replace(answers, gpu=ask(f"GPU ({', '.join(CATALOGUE)})", GPU))
    if is_interview and not answers.data:
        text = "Dataset of `raymega data prepare`; empty: built-in tokens"
        answers = replace(answers, data=ask(text, ""))
    return answers


def _ask(question: str, default: Any) -> Any:
    # asks again until the answer has the default's type
    return typer.prompt(question, default=default, show_default=default != "")


def _count_faults(gpus: int | None) -> list[Fault]:
    if gpus is None or gpus > 0:
        return []
    remedy = f"give --gpus 8, for example, or leave it out for {CPU_PROCESSES} CPU processes"
    return [Fault(fact=f"--gpus {gpus}", rule="a run has at least one worker", remedy=remedy)]


def _faults(answers: Answers) -> Iterator[Fault]:
    """Yield the faults of answers that are known before the model is read."""
    recipe = RECIPES.get(answers.recipe)
    if recipe is None:
        yield Fault(
            fact=f"raymega init {answers.recipe or 'without a recipe'}",
            rule=f"a recipe is one of {', '.join(RECIPES)}",
            remedy="use raymega init pretrain",
        )
        return
    if recipe.needs_model and not answers.model:
        yield Fault(
            fact=f"raymega init {recipe.name} without --model",
            rule="it trains a model that there is: a folder of Hugging Face, or a checkpoint",
            remedy=f"use raymega init {recipe.name} --model Llama-3.2-1B/"
            + (" --teacher Llama-3.1-8B/" if recipe.name == "distill" else ""),
        )
    if (recipe.name == "distill") is not bool(answers.teacher):
        needs = "without" if recipe.name == "distill" else "with"
        yield Fault(
            fact=f"raymega init {recipe.name} {needs} --teacher",
            rule="a distillation, and nothing else, learns from a larger model",
            remedy="use raymega init distill --model Llama-3.2-1B/ --teacher Llama-3.1-8B/",
        )
    yield from _place_faults(answers.out)


def _place_faults(out: Path) -> Iterator[Fault]:
    # a name that no file can have is told by the attempt to write it
    with suppress(OSError):
        if out.name == SCHEMA_FILE:
            yield Fault(
                fact=f"--out {out}",
                rule="the JSON schema beside the job file has that name",
                remedy=f"give --out {as_word(out.with_name('my-job.yaml'))}",
            )
        elif out.exists():
            yield Fault(
                fact=f"--out {out} exists",
                rule="a job file is never overwritten",
                remedy=f"give another file, --out {as_word(_free_name(out))}, or remove it",
            )
        elif not out.parent.is_dir():
            yield Fault(
                fact=f"--out {out}: there is no folder {out.parent}",
                rule="init makes no folders",
                remedy=f"run mkdir -p {as_word(out.parent)}",
            )


def _free_name(out: Path) -> Path:
    """Return the first name beside ``out``, or in the folder that it is, that no file has: my-job-2.yaml."""
    named = out / "my-job.yaml" if out.is_dir() else out
    others = (named.with_name(f"{named.stem}-{number}.yaml") for number in count(2))
    return next(each for each in chain([named], others) if not each.exists())


def _write(out: Path, text: str) -> None:
    """Write the job file, and the schema that its first line names.

    Raises:
        ConfigError: A file cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
        out.with_name(SCHEMA_FILE).write_text(f"{schema_text()}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            fact=f"--out {out}: {error.strerror}",
            rule="the job file and its schema are written to that folder",
            remedy="give --out my-job.yaml in a folder of yours",
        ) from error
