"""The tasks of a curation: a stage of one group, and the comparison of all groups.

It owns what a task reads and writes; the pipeline decides which run. The result of a task depends on
its arguments and its inputs alone, so that it may run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from time import thread_time

import numpy as np

from raymega.curate.document import CuratedDocument, DocumentWriter, read_curated
from raymega.curate.duplicates.exact import KeyCollector, without_lines
from raymega.curate.duplicates.keys import REMOVAL, id_of, order_of
from raymega.curate.duplicates.near import BandCollector
from raymega.curate.options import Lines
from raymega.curate.plan import Stage
from raymega.curate.recipe import StepSpec
from raymega.curate.state import Rows, State, get_parts
from raymega.curate.steps.step import Outcome, Step
from raymega.curate.steps.table import make_step
from raymega.curate.tally import Tally, increase
from raymega.prepare.documents import Document, read_documents
from raymega.prepare.readers.long_text import LONG_BYTES, LongText, utf8_bytes
from raymega.prepare.readers.pieces import ShardGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """Stage of one group, as a task.

    Attributes:
        stage: The stage.
        group: The group.
        name: Name of the group's objects in the stage's folder.
        before: Folder of the stage before; empty for the first.
        tables: Tables of what is removed first.
        num_groups: Number of groups.
        num_parts: Number of parts of the rows that are compared next.
        max_bad_lines: Number of bad lines that are left out.
        assets: Digests of the files of steps.
        has_equal_names: Whether files of several inputs have equal names, which then do not identify them.
    """

    stage: Stage
    group: ShardGroup
    name: str
    before: str
    tables: tuple[str, ...]
    num_groups: int
    num_parts: int
    max_bad_lines: int
    assets: tuple[tuple[str, str], ...]
    has_equal_names: bool


def asset_digest(content: bytes) -> str:
    """Return the name of a step's content below ``_state/assets/``."""
    return blake2b(content, digest_size=12).hexdigest()


def run_group(task: GroupTask, *, state: State) -> Tally:
    """Do a stage of one group: write its documents, then its record, and return the record.

    Raises:
        ConfigError: A file is damaged or has too many bad lines, or a package is missing.
        StorageError: The output cannot be read or written.
    """
    stage, tally = task.stage, Tally()
    assets = dict(task.assets)
    contents = [_asset(state, assets.get(spec.name, "")) for spec in stage.steps]
    steps = [
        (spec.name, make_step(spec, content))
        for spec, content in zip(stage.steps, contents, strict=True)
    ]
    collector = _collector(stage.next_comparison, task.num_parts)
    row = 0
    with DocumentWriter() as writer:
        for document in _documents(task, state, tally):
            if not _apply(steps, document, tally):
                continue
            tally.count_result(document)
            writer.add(document)
            if collector and stage.next_comparison:
                started = thread_time()
                collector.add(document, row)
                tally.step(stage.next_comparison.name).cpu_s += thread_time() - started
            row += 1
        content = writer.close()
    state.put(f"{stage.folder}/documents/{task.name}", content)
    if collector:
        collector.write(state, stage.folder, task.name)
    tally.stored_bytes = len(content)
    # The record comes last: what it stands for is whole.
    state.put(f"{stage.folder}/done/{task.name}", tally.encode())
    return tally


def _documents(task: GroupTask, state: State, tally: Tally) -> Iterator[CuratedDocument]:
    """Yield the documents that come into the stage."""
    if not task.before:
        yield from _read_files(task, tally)
        return
    content = state.get(f"{task.before}/documents/{task.name}")
    removals = get_parts(state, task.tables, task.group.index, task.num_groups, REMOVAL)
    assert task.stage.comparison is not None, "only the first stage has none"
    yield from remove(read_curated(content), removals, task.stage.comparison, tally)


def _read_files(task: GroupTask, tally: Tally) -> Iterator[CuratedDocument]:
    counts, started = tally.step("read"), thread_time()
    documents = read_documents(task.group, max_bad_lines=task.max_bad_lines, may_be_long=True)

    def taken(found: Document) -> CuratedDocument:
        nonlocal started
        counts.count(found.num_bytes, found.num_bytes, reason="", is_removed=False)
        increase(tally.lengths_read, {str(found.num_bytes.bit_length()): 1})
        text = found.long_text or found.text
        if found.num_bytes > LONG_BYTES and isinstance(text, str):
            text = LongText(text.encode())
        source = found.name.encode("utf-8", "replace").decode()
        counts.cpu_s += thread_time() - started
        return CuratedDocument(id=_id(found, task), text=text, source=source, url=found.url)

    # No name refers to a document that is given away: a large one is freed as soon as can be.
    for document in map(taken, documents):
        yield document
        started = thread_time()
    counts.cpu_s += thread_time() - started
    tally.num_bad = len(documents.bad)


def _id(found: Document, task: GroupTask) -> str:
    """Return the id of a document: it depends on the name of its file below the input, so it stays as a corpus moves."""
    file, place = task.group.pieces[found.piece].file, found.name.rpartition("@")[2]
    name = f"{file.label if task.has_equal_names else file.name}@{place}"
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def remove(
    documents: Iterator[CuratedDocument], removals: Rows, spec: StepSpec, tally: Tally
) -> Iterator[CuratedDocument]:
    """Yield what a comparison leaves of a group's documents, and count what it takes.

    Args:
        documents: Documents of the group, in order.
        removals: Rows of the REMOVAL table of the group.
        spec: The step that compared.
        tally: Counts to add to.
    """
    removals = removals[order_of(removals, "row", "line")]
    rows, start = np.ascontiguousarray(removals["row"]), 0
    counts = tally.step(spec.name)
    for row, document in enumerate(documents):
        started, before = thread_time(), utf8_bytes(document.text)
        end = int(np.searchsorted(rows, row, side="right"))
        found, start = removals[start:end], end
        outcome = _take(document, found, spec) if len(found) else Outcome()
        after = utf8_bytes(document.text)
        counts.count(before, after, reason=outcome.reason, is_removed=outcome.is_removed)
        if outcome.reason:
            of = id_of(int(found["high"][0]), int(found["low"][0]))
            counts.show(document, reason=outcome.reason, text=outcome.shown, of=of)
        counts.cpu_s += thread_time() - started
        if not outcome.is_removed:
            yield document


def _take(document: CuratedDocument, found: Rows, spec: StepSpec) -> Outcome:
    """Remove a document or its lines; ``found`` are its rows of the REMOVAL table, at least one."""
    _, _, high, low, score = found[0].tolist()
    of = id_of(high, low)
    if not isinstance(spec.options, Lines):
        similar = f"{spec.name} {int(score * 20) / 20:.2f}" if spec.name == "near" else "copy"
        return Outcome(
            similar, is_removed=True, shown=f"[{score:.4f} of {of}] {document.text[:400]}"
        )
    kept, lines = without_lines(document.text, np.unique(found["line"]).tolist(), spec.options)
    shown = "\n".join(lines)[:400]
    if not kept:
        return Outcome("all lines", is_removed=True, shown=shown)
    document.text = kept
    document.reasons.append(f"lines: {len(found)} removed")
    return Outcome("some lines", shown=shown)


def _apply(steps: Sequence[tuple[str, Step]], document: CuratedDocument, tally: Tally) -> bool:
    """Send a document through the steps; return False if one removes it."""
    size = utf8_bytes(document.text) if steps else 0
    for name, step in steps:
        counts, started, text = tally.step(name), thread_time(), document.text
        outcome = step.apply(document)
        counts.cpu_s += thread_time() - started
        after = size if document.text is text else utf8_bytes(document.text)
        counts.count(size, after, reason=outcome.reason, is_removed=outcome.is_removed)
        if outcome.reason:
            counts.show(document, reason=outcome.reason, text=outcome.shown)
        if outcome.is_removed:
            return False
        size = after
    return True


def _collector(spec: StepSpec | None, num_parts: int) -> KeyCollector | BandCollector | None:
    if spec is None:
        return None
    collector = BandCollector if spec.name == "near" else KeyCollector
    return collector(spec, num_parts)


@cache
def _asset(state: State, digest: str) -> bytes:
    # Once a process, as models and hashes of tasks may be large.
    return state.get(f"assets/{digest}") if digest else b""
