"""Commands `raymega data curate` and `raymega data train-quality`."""

from __future__ import annotations

from typing import Annotated

import typer

from raymega.cli.options import Address, AsJson
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars


def curate(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...")],
    out: str,
    recipe: str,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    text_key: str = "text",
    max_bad_lines: int = 0,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Curate text into a corpus of Parquet files: filtered, without duplicates, with a report.

    Inputs are those of `raymega data prepare`, which also reads the result. The same command again
    continues what was interrupted, or finds the finished corpus.

    Options:
        inputs: Input files, folders or URIs.
        out: Output folder that all nodes share, or s3://bucket/prefix.
        recipe: YAML file with the steps, or a shipped one: jobs/curate/mt-nlg.yaml, jobs/curate/fineweb.yaml.
        include: Read only files that match, such as '*.jsonl'; repeatable.
        exclude: Skip files that match, such as test/; repeatable.
        text_key: Key of JSON objects or column of tables that holds the text.
        max_bad_lines: Number of lines, rows or texts that are no document and may be left out.

    Example: raymega data curate crawl/ --out corpus --recipe jobs/curate/fineweb.yaml
    """
    # Imported here: Ray Data is slow to import, and the other commands do without it.
    from raymega.curate.checks import CurateOptions
    from raymega.curate.pipeline import curate as run_curate

    options = CurateOptions(
        inputs=tuple(inputs), out=out, recipe=recipe, include=tuple(include or ["*"]),
        exclude=tuple(exclude or []), text_key=text_key, max_bad_lines=max_bad_lines, address=address,
    )  # fmt: skip
    with phase_bars() as on_progress:
        done = run_curate(options, on_progress=on_progress)
    report = f"{done.uri}/_report/report.html"
    if as_json:
        print_json(
            {
                "output": done.uri, "files": done.files, "report": report, "seconds": done.seconds,
                "is_cached": done.is_cached, **done.counts,
            }
        )  # fmt: skip
        return
    rows = [
        (
            step["name"], step["documents_in"], step["documents_in"] - step["documents_out"],
            step["documents_changed"], step["documents_out"], step["bytes_out"],
        )
        for step in done.counts["steps"]
    ]  # fmt: skip
    print(table(("step", "documents", "removed", "changed", "kept", "text bytes"), rows))
    for key, value in {
        "output": done.uri, "files": len(done.files), "report": report,
        "seconds": f"{done.seconds:.3f}", "is cached": done.is_cached,
    }.items():  # fmt: skip
        print(f"{key}: {value}")


def train_quality(
    good: list[str],
    raw: list[str],
    out: str,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    text_key: str = "text",
    as_json: AsJson = False,
) -> None:
    """Train the model of the step quality_model: good documents against raw ones.

    A tenth of both is held out, by a hash of the text, and measured.

    Options:
        good: Files, folders or URIs with documents as they should be; repeatable.
        raw: Files, folders or URIs with documents as they come; repeatable.
        out: File of the model.
        include: Read only files that match, such as '*.jsonl'; repeatable.
        exclude: Skip files that match, such as test/; repeatable.
        text_key: Key of JSON objects or column of tables that holds the text.

    Example: raymega data train-quality --good books/ --raw crawl/ --out quality.npz
    """
    from raymega.curate.train_quality import QualityData, train_quality_model

    data = QualityData(
        good=tuple(good), raw=tuple(raw), include=tuple(include or ["*"]),
        exclude=tuple(exclude or []), text_key=text_key,
    )  # fmt: skip
    with phase_bars() as on_progress:
        found = train_quality_model(data, out, on_progress=on_progress)
    if as_json:
        print_json({"output": out} | found)
        return
    for key, value in ({"output": out} | found).items():
        print(f"{key.replace('_', ' ')}: {value if isinstance(value, str) else f'{value:,.4g}'}")
