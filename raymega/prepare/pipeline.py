"""Runs `raymega data prepare`: from text to a committed dataset, on Ray Data.

It owns the order of the phases; the phases are in the other modules of `raymega.prepare`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import ray.data

from raymega.data.format import (
    COUNTS_FILE,
    TOKENIZER_FILE,
    DatasetMeta,
    SourceMeta,
    local_folder,
)
from raymega.data.remote_dataset import is_remote
from raymega.errors import ConfigError, Fault, StorageError, raise_faults
from raymega.prepare.documents import read_documents
from raymega.prepare.output import FolderOutput
from raymega.prepare.remote_output import StoreOutput
from raymega.prepare.shards import Counts, GroupDone, write_group
from raymega.prepare.sources import (
    ShardGroup,
    SourceFile,
    files_digest,
    list_files,
    make_groups,
    split_of,
)
from raymega.prepare.tokenizer import Encoder, check_tokenizer, make_tokenizer, needs_sample
from raymega.prepare.totals import Totals
from raymega.session import session_at

SAMPLE_BYTES = 8 << 20
OnProgress = Callable[[str, int, int], None]
Output = FolderOutput | StoreOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of a preparation.

    Attributes:
        inputs: Files, folders or URIs with text.
        out: Folder of the dataset, which all nodes must share; or a URI in an object store.
        tokenizer: Tokenizer: ``bytes``, ``bpe:N`` or the path of a `tokenizers` file.
        valid_fraction: Share of documents held out, from 0 to below 1, chosen by a hash of their
            names.
        include: Patterns of files to read; a file must match at least one.
        exclude: Patterns of files to leave out; a file must match none.
        address: Address of the Ray cluster; see `raymega.session.session_at`.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: str
    valid_fraction: float = 0.02
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    address: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Result of a preparation: the dataset at ``uri``; ``is_cached`` if it existed before."""

    uri: str
    meta: DatasetMeta
    seconds: float
    is_cached: bool


def prepare(options: PrepareOptions, *, on_progress: OnProgress) -> Prepared:
    """Prepare a dataset, or return the finished one with the same recipe.

    The same inputs and options give the same shards, byte for byte, for any number of CPUs. Memory
    is bounded by the largest document times the CPUs, and the sample of the tokenizer.

    Args:
        options: Options of the preparation.
        on_progress: Callback with (phase, done, total) during the work.

    Raises:
        ConfigError: An option, an input or the output is invalid; nothing was committed.
        DataError: The output holds a finished dataset whose shards are missing or damaged.
        StorageError: The output's object store fails.
    """
    started = monotonic()
    output = _output_at(options.out)
    # Check everything; a finished dataset of the same recipe is the result.
    recipe, files = _plan_work(options, output)
    meta = output.find_finished(recipe)
    is_cached = meta is not None
    # Otherwise claim the output, write the data, and commit.
    if meta is None:
        output.claim(recipe)
        meta = _write_dataset(options, recipe, output, files, on_progress)
        output.commit(meta)
    return Prepared(uri=output.uri, meta=meta, seconds=monotonic() - started, is_cached=is_cached)


def _output_at(out: str) -> Output:
    if is_remote(out):
        return StoreOutput(uri=out)
    return FolderOutput(folder=local_folder(out).absolute())


def _plan_work(options: PrepareOptions, output: Output) -> tuple[dict[str, str], list[SourceFile]]:
    """Return the recipe, which determines the dataset, and the files to read.

    Raises:
        ConfigError: With one fault for each invalid option, input or output.
    """
    # Collect the faults of options, tokenizer, inputs and output before raising any.
    faults: list[Fault | str] = [*_option_faults(options)]
    tokenizer = _or_faults(faults, partial(check_tokenizer, options.tokenizer))
    include, exclude = options.include, options.exclude
    files = _or_faults(
        faults, partial(list_files, options.inputs, include=include, exclude=exclude)
    )
    if files is not None and not any(file.num_bytes for file in files):
        faults.append(_no_text(options.inputs))
    if isinstance(output, FolderOutput):
        faults += _folder_faults(output.folder, files or [])
    if faults:
        raise ConfigError(*faults)
    assert tokenizer is not None and files is not None, "what is missing was a fault"
    # Everything that the bytes of the shards depend on.
    recipe = {
        "inputs": files_digest(files),
        "tokenizer": tokenizer,
        "valid_fraction": repr(options.valid_fraction),
    }
    return recipe, files


Made = TypeVar("Made")


def _or_faults(faults: list[Fault | str], make: Callable[[], Made]) -> Made | None:
    """Return the result of ``make``; on a ConfigError add its faults to ``faults``, return None."""
    try:
        return make()
    except ConfigError as error:
        faults += error.faults
        return None


def _folder_faults(folder: Path, files: Sequence[SourceFile]) -> list[Fault]:
    if any(Path(file.path).is_relative_to(folder) for file in files):
        return [_output_in_input(folder)]
    return [_output_is_a_file(folder)] if folder.exists() and not folder.is_dir() else []


def _write_dataset(
    options: PrepareOptions,
    recipe: dict[str, str],
    output: Output,
    files: Sequence[SourceFile],
    on_progress: OnProgress,
) -> DatasetMeta:
    """Write everything but dataset.json, whose content is returned."""
    # Tokenizer: trained on a sample, or given.
    groups = make_groups(files)
    sample = _draw_sample(groups, options, on_progress)
    tokenizer = make_tokenizer(options.tokenizer, sample)
    output.put(TOKENIZER_FILE, tokenizer.encode())
    encoder = Encoder(tokenizer)
    # Tokenise on the cluster, one task per group.
    totals = Totals(encoder.vocab_size)
    on_progress("tokenising", 0, len(groups))
    with session_at(options.address):
        for done in _run_groups(groups, output, options.valid_fraction):
            totals.add(done)
            on_progress("tokenising", totals.num_groups, len(groups))
    raise_faults(ConfigError, totals.faults or totals.split_faults(options.valid_fraction))
    # Token counts, then the description.
    for name, counts in totals.counts.items():
        output.put(f"{name}/{COUNTS_FILE}", _npy(counts))
    return DatasetMeta(
        recipe=recipe,
        vocab_size=encoder.vocab_size,
        eod_id=encoder.eod_id,
        dtype=encoder.dtype,
        splits=totals.splits(),
        valid_entropy=totals.valid_entropy(),
        source=SourceMeta(
            inputs=options.inputs,
            num_files=len(files),
            num_bytes=sum(file.num_bytes for file in files),
            num_replaced=totals.num_replaced,
            num_tokenizer_bytes=sum(len(text.encode()) for text in sample),
        ),
    )


def _draw_sample(
    groups: Sequence[ShardGroup], options: PrepareOptions, on_progress: OnProgress
) -> list[str]:
    """Return texts of the training split to train a tokenizer on; none if it needs no training.

    Groups are random samples of the corpus, so the first SAMPLE_BYTES represent it.
    """
    texts: list[str] = []
    num_bytes = 0
    documents = chain.from_iterable(map(read_documents, groups))
    while needs_sample(options.tokenizer) and num_bytes < SAMPLE_BYTES:
        document = next(documents, None)
        if document is None:
            break
        if split_of(document.name, options.valid_fraction) == "train":
            texts.append(document.text)
            num_bytes += document.num_bytes
            on_progress("sampling", min(num_bytes, SAMPLE_BYTES), SAMPLE_BYTES)
    return texts


def _run_groups(
    groups: Sequence[ShardGroup], output: Output, valid_fraction: float
) -> Iterator[GroupDone]:
    """Run one task per group and yield the results of the tasks as Ray Data returns them."""
    # Ray Data's own progress bars and log lines would break into the command's.
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    run = partial(_run_task, output=output, valid_fraction=valid_fraction)
    # One block a group, so that each group is a task of its own.
    items = ray.data.from_items(list(groups), override_num_blocks=len(groups))
    for row in items.map(run, num_cpus=1).iter_rows():
        yield row["item"]


def _run_task(row: dict[str, Any], *, output: Output, valid_fraction: float) -> dict[str, Any]:
    """Run a group's task on a row of Ray Data, a dict whose only value is the group."""
    group: ShardGroup = row["item"]
    try:
        with output.task_folder() as folder:
            done = write_group(group, folder=folder, valid_fraction=valid_fraction)
    except StorageError as error:
        # A failed upload is a fault in the report, as the errors that write_group catches.
        faults = tuple(fault for fault in error.faults if isinstance(fault, Fault))
        done = GroupDone(index=group.index, faults=faults)
    return {"item": done}


def _npy(counts: Counts) -> bytes:
    buffer = BytesIO()
    np.save(buffer, counts)
    return buffer.getvalue()


def _option_faults(options: PrepareOptions) -> list[Fault]:
    if 0 <= options.valid_fraction < 1:
        return []
    return [
        Fault(
            fact=f"--valid-fraction {options.valid_fraction}",
            rule="it must be at least 0 and below 1",
            remedy="use 0.02",
        )
    ]


def _no_text(inputs: Sequence[str]) -> Fault:
    return Fault(
        fact=f"the files of {', '.join(inputs)} are all empty",
        rule="a dataset needs text",
        remedy="give files with text in them",
    )


def _output_is_a_file(folder: Path) -> Fault:
    return Fault(
        fact=f"--out {folder} is a file",
        rule="a dataset is a folder",
        remedy="give another path, or remove the file",
    )


def _output_in_input(folder: Path) -> Fault:
    return Fault(
        fact=f"--out {folder} holds files that an INPUT selects",
        rule="a dataset must not become its own source",
        remedy="give an --out outside of every INPUT, or leave it out with --exclude",
    )
