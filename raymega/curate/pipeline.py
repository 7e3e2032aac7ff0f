"""Runs `raymega data curate`: from files of text to a corpus in Parquet, on Ray Data.

It owns the order of the phases. What is finished is kept in the output, so that a curation that was
killed or refused continues.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, cast

from raymega.curate.assets import read_assets
from raymega.curate.checks import CurateOptions, claim, find_finished, option_faults, tidy
from raymega.curate.document import join_files
from raymega.curate.duplicates.exact import remove_copies
from raymega.curate.duplicates.near import verify_pairs, write_pairs, write_removals
from raymega.curate.metrics import report_speed
from raymega.curate.options import Near
from raymega.curate.plan import Stage, describe, plan_stages
from raymega.curate.recipe import StepSpec, read_recipe
from raymega.curate.report import curation_page
from raymega.curate.state import State
from raymega.curate.steps.table import LOCAL_STEPS, make_step
from raymega.curate.tally import Tally, counts_of, decode_tally
from raymega.curate.tasks import GroupTask, asset_digest, run_group
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, Fault, RaymegaError
from raymega.prepare.cluster import on_cluster
from raymega.prepare.documents import too_many_bad
from raymega.prepare.groups import make_groups, with_keys
from raymega.prepare.options import folder_faults, no_text
from raymega.prepare.pipeline import unopened
from raymega.prepare.readers.corpora import FINISHED
from raymega.prepare.readers.pieces import ShardGroup, SourceFile
from raymega.prepare.sources import files_digest, list_files
from raymega.session import session_at

log = logging.getLogger(__name__)

PART_BYTES = 128 << 20
"""Size of a Parquet file of the output; it holds whole groups of this size or a little more."""
COMPARED_BYTES = 256 << 20
MOST_PARTS = 1024
"""Text of the corpus for each part of a comparison, and the largest number of parts."""
MAX_FAULTS = 20
REPORT_FOLDER = "_report"
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curated:
    """Result of a curation.

    Attributes:
        uri: Folder or URI of the output.
        counts: Content of ``_report/counts.json``.
        files: Names of the Parquet files, in order.
        seconds: Duration of the whole curation.
        is_cached: True if the corpus existed before.
    """

    uri: str
    counts: dict[str, Any]
    files: tuple[str, ...]
    seconds: float
    is_cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Everything that the phases need."""

    options: CurateOptions
    state: State
    specs: tuple[StepSpec, ...]
    stages: tuple[Stage, ...]
    groups: tuple[ShardGroup, ...]
    assets: tuple[tuple[str, str], ...]
    num_parts: int
    has_equal_names: bool
    recipe: dict[str, str]
    on_progress: OnProgress


def curate(options: CurateOptions, *, on_progress: OnProgress) -> Curated:
    """Curate a corpus, or return the finished one with the same recipe.

    The same inputs and recipe give the same Parquet, byte for byte, for any number of CPUs, in any
    order of the inputs, and wherever an earlier curation was killed.

    Args:
        options: Options of the curation.
        on_progress: Callback with (phase, done, total) during the work.

    Raises:
        ConfigError: The recipe, an option, an input or the output is invalid.
        StorageError: The output cannot be read or written.
    """
    started = monotonic()
    # Check everything; a finished corpus of the same recipe is the result.
    specs = read_recipe(options.recipe)
    contents, files = _check(options, specs)
    work = _plan(options, specs, contents, files, on_progress)
    found = find_finished(work.state, work.recipe, FINISHED)
    if found is not None:
        # Left by a curation that was killed after its record.
        tidy(options, work.state)
        return Curated(
            uri=options.uri, counts=found["counts"], files=tuple(found["files"]),
            seconds=monotonic() - started, is_cached=True,
        )  # fmt: skip
    claim(work.state, work.recipe)
    # Otherwise do the stages, join what they leave, and report.
    for content in contents.values():
        work.state.put(f"assets/{asset_digest(content)}", content)
    on_progress("starting Ray", 0, 1)
    with session_at(options.address):
        total = Tally()
        for stage in work.stages:
            _run_stage(work, stage, total)
        names = _join(work)
    counts = _report(work, total, monotonic() - started)
    finished = {"recipe": work.recipe, "files": names, "counts": counts}
    work.state.put(FINISHED, json.dumps(finished, indent=1).encode())
    tidy(options, work.state)
    return Curated(
        uri=options.uri, counts=counts, files=tuple(names), seconds=monotonic() - started, is_cached=False
    )  # fmt: skip


def _check(
    options: CurateOptions, specs: Sequence[StepSpec]
) -> tuple[dict[str, bytes], list[SourceFile]]:
    """Return the content of the steps' files, and the files of the corpus."""
    faults, contents, files = list[Fault | str](option_faults(options)), dict[str, bytes](), []
    # Sorted, as a file in two inputs belongs to the first.
    inputs = sorted(dict.fromkeys(options.inputs))
    try:
        files = list_files(inputs, include=options.include, exclude=options.exclude)
        if not any(file.num_bytes for file in files):
            faults.append(no_text(options.inputs))
        faults += extract_faults(files, specs)
        if not is_remote(options.out):
            faults += folder_faults(Path(options.uri), files)
    except ConfigError as error:
        faults += error.faults
    try:
        contents = read_assets(specs)
        # Packages are missed here, and not on some node after hours.
        for spec in specs:
            if spec.name in LOCAL_STEPS:
                make_step(spec, contents.get(spec.name, b""))
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return contents, sorted(files, key=lambda file: (file.form.stem, file.name, file.label))


def extract_faults(files: Sequence[SourceFile], specs: Sequence[StepSpec]) -> list[Fault]:
    """Return a fault if there are pages, and the recipe does not make text of them."""
    pages = [file.label for file in files if file.form.format in ("html", "warc")]
    if not pages or any(spec.name == "extract" for spec in specs):
        return []
    return [
        Fault(
            fact=f"{pages[0]} is a page, and the recipe has no step extract",
            rule="pages become text by the step extract",
            remedy="write extract as the first of steps, or leave them out with --exclude '*.html'",
        )
    ]


def _plan(
    options: CurateOptions, specs: tuple[StepSpec, ...], contents: dict[str, bytes],
    files: Sequence[SourceFile], on_progress: OnProgress,
) -> _Work:  # fmt: skip
    assets = {name: asset_digest(content) for name, content in contents.items()}
    has_equal_names = max(Counter(file.name for file in files).values()) > 1
    corpus, reading = files_digest(files), f"{options.text_key} {has_equal_names}"
    labels = "\n".join(file.label for file in files).encode(errors="surrogatepass")
    labelled = f"{corpus} {asset_digest(labels)}"
    if has_equal_names:
        # Then ids are of the inputs as they were given.
        corpus = labelled
    # What is kept has the labels as they were given; a finished corpus is found however they are.
    stages = plan_stages(specs, assets=assets, corpus=labelled, reading=reading)
    try:
        groups = make_groups(files, text_key=options.text_key)
    except OSError as error:
        raise ConfigError(unopened(error)) from error
    num_bytes = sum(file.num_bytes for file in files)
    num_parts = min(-(-num_bytes // COMPARED_BYTES), MOST_PARTS)
    return _Work(
        options=options, state=State(uri=options.uri), specs=specs, stages=tuple(stages),
        groups=tuple(with_keys(groups, {"stage": stages[0].digest, "parts": str(num_parts)})),
        assets=tuple(assets.items()), num_parts=num_parts, has_equal_names=has_equal_names,
        recipe={"inputs": corpus, "reading": reading}
        | {f"{at} {spec.name}": describe(spec, assets) for at, spec in enumerate(specs)},
        on_progress=on_progress,
    )  # fmt: skip


def _run_stage(work: _Work, stage: Stage, total: Tally) -> None:
    """Do a stage of all groups that are not finished, then the comparison behind it."""
    names, done = [group.key for group in work.groups], work.state.names(f"{stage.folder}/done/")
    before = work.stages[stage.number - 1].folder if stage.number else ""
    compared = work.stages[stage.number - 1].whole_folder if stage.number else ""
    tables = work.state.names(f"{compared}/removed/") if compared else set()
    task = partial(
        GroupTask, stage=stage, before=before, num_groups=len(names), num_parts=work.num_parts,
        tables=tuple(f"{compared}/removed/{name}" for name in sorted(tables)),
        max_bad_lines=work.options.max_bad_lines, assets=work.assets,
        has_equal_names=work.has_equal_names,
    )  # fmt: skip
    tasks = [task(group=group, name=group.key) for group in work.groups]
    pending = [each for each in tasks if each.name not in done]
    _run_all(work, _phase(stage), pending, partial(run_group, state=work.state), len(tasks))
    is_last = stage.next_comparison is None
    for record in work.state.get_all([f"{stage.folder}/done/{name}" for name in names]):
        total.add(decode_tally(record), is_later=is_last)
    if total.num_bad > work.options.max_bad_lines:
        raise ConfigError(_bad_lines(total.num_bad, work.options.max_bad_lines))
    if stage.next_comparison is not None:
        _compare(work, stage, stage.next_comparison, names, total)


def _compare(work: _Work, stage: Stage, spec: StepSpec, names: list[str], total: Tally) -> None:
    """Compare the documents of all groups, and write which are removed."""
    _run_comparison(work, stage, spec, names)
    folder = f"{stage.whole_folder}/cpu_s/"
    spent = work.state.get_all([f"{folder}{name}" for name in sorted(work.state.names(folder))])
    total.step(spec.name).cpu_s += sum(map(float, spent))


def _run_comparison(work: _Work, stage: Stage, spec: StepSpec, names: list[str]) -> None:
    state, num_parts, folder = work.state, work.num_parts, stage.whole_folder
    parts = range(num_parts)
    shared: dict[str, Any] = {
        "state": state, "stage": stage, "names": names, "num_parts": num_parts
    }  # fmt: skip

    def missing(kind: str) -> list[int]:
        there = state.names(f"{folder}/{kind}/")
        return [part for part in parts if f"{part:05d}" not in there]

    def timed(kind: str, run: Callable[[int], None]) -> Callable[[int], Tally]:
        return partial(_timed, kind=kind, run=run, state=state, stage=stage, name=spec.name)

    if spec.name != "near":
        run = timed("removed", partial(remove_copies, spec=spec, **shared))
        _run_all(work, f"{spec.name}: comparing", missing("removed"), run, num_parts)
        return
    # Pairs by bands, their true similarity, then which documents go.
    run = timed("pairs", partial(write_pairs, **shared))
    _run_all(work, "near: pairs", missing("pairs"), run, num_parts)
    there = state.names(f"{folder}/verified/")
    pending = [number for number, name in enumerate(names) if name not in there]
    run = timed("verified", partial(verify_pairs, options=cast(Near, spec.options), **shared))
    _run_all(work, "near: verifying", pending, run, len(names))
    if missing("removed") == list(parts):
        write_removals(state, stage, names)


def _timed(
    item: int, *, kind: str, run: Callable[[int], None], state: State, stage: Stage, name: str
) -> Tally:
    """Run a task of a comparison; return the CPU seconds, and keep them for the report."""
    tally, started = Tally(), thread_time()
    run(item)
    tally.step(name).cpu_s = thread_time() - started
    spent = repr(tally.step(name).cpu_s)
    state.put(f"{stage.whole_folder}/cpu_s/{kind}-{item}", spent.encode())
    return tally


def _join(work: _Work) -> list[str]:
    """Write the Parquet files of the output, and return their names."""
    last, state = work.stages[-1], work.state
    parts, size = [list[str]()], 0
    records = state.get_all([f"{last.folder}/done/{group.key}" for group in work.groups])
    for group, record in zip(work.groups, records, strict=True):
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(group.key)
        size += decode_tally(record).stored_bytes
    names = [f"part-{number:06d}.parquet" for number in range(len(parts))]
    # Files of a recipe that was given up, or of other inputs, are not among these.
    joined = f"{last.whole_folder}/joined/"
    for name in state.names("stages/"):
        if "/joined/" in name and not f"stages/{name}".startswith(joined):
            state.delete(f"stages/{name}")
    written = state.names(joined)
    for name in set(state.store.list("part-")) - written:
        state.store.delete(name)
    pending = [item for item in zip(names, parts, strict=True) if item[0] not in written]
    run = partial(_write_part, state=state, stage=last)
    _run_all(work, "joining", pending, run, len(parts))
    return names


def _write_part(item: tuple[str, list[str]], *, state: State, stage: Stage) -> None:
    name, groups = item
    content = join_files(state.get(f"{stage.folder}/documents/{group}") for group in groups)
    state.store.put(name, [content], overwrite=True)
    state.put(f"{stage.whole_folder}/joined/{name}", b"")


def _report(work: _Work, total: Tally, seconds: float) -> dict[str, Any]:
    """Write the report, and return the counts."""
    order = ["read", *(spec.name for spec in work.specs if spec.name != "extract")]
    counts = dict(counts_of(total, order))
    speed = {name: total.step(name).cpu_s for name in order}
    put = work.state.store.put
    for name, content in (
        ("counts.json", json.dumps(counts, indent=1, ensure_ascii=False)),
        ("speed.json", json.dumps({"seconds": seconds, "cpu_s": speed}, indent=1)),
        ("report.html", curation_page(counts, speed, inputs=work.options.inputs, seconds=seconds)),
    ):
        put(f"{REPORT_FOLDER}/{name}", [content.encode()], overwrite=True)
    return counts


def _run_all(
    work: _Work, phase: str, items: Sequence[Any], run: Callable[[Any], Any], total: int
) -> None:
    """Run tasks, and show how many of all are done.

    Raises:
        ConfigError: Some inputs are damaged; the other tasks have run.
        RaymegaError: The first other error.
    """
    done, faults = total - len(items), list[Fault | str]()
    work.on_progress(phase, done, total)
    for result in _results(items, run):
        if isinstance(result, ConfigError):
            faults += result.faults
            if len(faults) >= MAX_FAULTS:
                break
            continue
        if isinstance(result, RaymegaError):
            raise result
        if isinstance(result, Tally):
            report_speed(result)
        done += 1
        work.on_progress(phase, done, total)
    if faults:
        raise ConfigError(*faults)


def _results(items: Sequence[Any], run: Callable[[Any], Any]) -> Iterator[Any]:
    yield from on_cluster(items, partial(_run_caught, run=run))


def _run_caught(item: Any, *, run: Callable[[Any], Any]) -> Any:
    """Run a task; an error is a value, because Ray Data would wrap it."""
    try:
        return run(item)
    except RaymegaError as error:
        return error
    except OSError as error:
        return ConfigError(
            fact=f"{type(error).__name__}: {error}",
            rule="every node must be able to read the inputs and to write to --out",
            remedy="correct the permissions or make room; finished work is kept",
        )


def _phase(stage: Stage) -> str:
    names = [spec.name for spec in stage.steps]
    before = [f"without {stage.comparison.name}"] if stage.comparison else ["read"]
    return ", ".join([*before, *names])


def _bad_lines(found: int, most: int) -> Fault:
    return replace(
        too_many_bad([], most), fact=f"{found} lines of the inputs are no documents",
        remedy=f"repair the files, or skip such lines with --max-bad-lines {found}",
    )  # fmt: skip
