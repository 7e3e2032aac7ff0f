"""Runs `raymega data prepare`: from text to a committed dataset, on Ray Data.

It owns the order of the phases; the phases are in the other modules of `raymega.prepare`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import ray.data

from raymega.data.arrow import token_dtype
from raymega.data.format import (
    COUNTS_FILE,
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
from raymega.prepare.tokenizer.choice import (
    TokenizerChoice,
    TokenizerOptions,
    choose_tokenizer,
    make_tokenizer,
)
from raymega.prepare.tokenizer.encoder import EncodingRules
from raymega.prepare.totals import Totals
from raymega.session import session_at

log = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
Output = FolderOutput | StoreOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of a preparation.

    Attributes:
        inputs: Files, folders or URIs with text.
        out: Folder of the dataset, which all nodes must share; or a URI in an object store.
        tokenizer: Tokenizer: ``bytes``, ``bpe:N``, or the path of a file or folder.
        valid_fraction: Share of documents held out, from 0 to below 1, chosen by a hash of their
            names.
        include: Patterns of files to read; a file must match at least one.
        exclude: Patterns of files to leave out; a file must match none.
        address: Address of the Ray cluster; see `raymega.session.session_at`.
        eod_token: Text of the token that ends a document; empty for the tokenizer's own choice.
        add_bos: True to begin every document with the tokenizer's ``bos_token``.
        parse_special_tokens: True if special tokens that a document spells out become these tokens.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: str
    valid_fraction: float = 0.02
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    address: str = "auto"
    eod_token: str = ""
    add_bos: bool = False
    parse_special_tokens: bool = False

    @property
    def tokenizer_options(self) -> TokenizerOptions:
        """Options of the tokenizer alone."""
        return TokenizerOptions(
            name=self.tokenizer, eod_token=self.eod_token, add_bos=self.add_bos,
            parse_special_tokens=self.parse_special_tokens,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Result of a preparation.

    Attributes:
        uri: Folder or URI of the dataset.
        meta: Description of the dataset.
        seconds: Duration of the whole preparation.
        ray_start_seconds: Part of it until Ray was connected or started.
        engines: Number of groups that each engine encoded.
        is_cached: True if the dataset existed before.
    """

    uri: str
    meta: DatasetMeta
    seconds: float
    ray_start_seconds: float = 0.0
    engines: dict[str, int] = field(default_factory=dict)
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
    choice, recipe, files = _plan_work(options, output)
    meta = output.find_finished(recipe)
    if meta is not None:
        seconds = monotonic() - started
        return Prepared(uri=output.uri, meta=meta, seconds=seconds, is_cached=True)
    # Otherwise claim the output, write the data, and commit.
    output.claim(recipe)
    meta, work = _write_dataset(options, choice, recipe, output, files, on_progress)
    output.commit(meta)
    return Prepared(
        uri=output.uri, meta=meta, seconds=monotonic() - started, is_cached=False,
        ray_start_seconds=work.ray_start_seconds, engines=work.totals.engines,
    )  # fmt: skip


def _output_at(out: str) -> Output:
    if is_remote(out):
        return StoreOutput(uri=out)
    return FolderOutput(folder=local_folder(out).absolute())


def _plan_work(
    options: PrepareOptions, output: Output
) -> tuple[TokenizerChoice, dict[str, str], list[SourceFile]]:
    """Return the tokenizer, the recipe, which determines the dataset, and the files to read.

    Raises:
        ConfigError: With one fault for each invalid option, input or output.
    """
    # Collect the faults of options, tokenizer, inputs and output before raising any.
    faults: list[Fault | str] = [*_option_faults(options)]
    tokenizer = _or_faults(faults, partial(choose_tokenizer, options.tokenizer_options))
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
        **tokenizer.recipe,
        "valid_fraction": repr(options.valid_fraction),
    }
    return tokenizer, recipe, files


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Sums over the tasks, and the time until Ray was there."""

    totals: Totals
    ray_start_seconds: float


def _write_dataset(
    options: PrepareOptions,
    choice: TokenizerChoice,
    recipe: dict[str, str],
    output: Output,
    files: Sequence[SourceFile],
    on_progress: OnProgress,
) -> tuple[DatasetMeta, _Work]:
    """Write everything but dataset.json, whose content is returned."""
    # Tokenizer: trained on a sample, or given.
    groups = make_groups(files)
    sample = _draw_sample(groups, options, choice.sample_bytes, on_progress)
    tokenizer = make_tokenizer(choice, sample)
    for name, content in tokenizer.files.items():
        output.put(name, content)
    work = _tokenize(groups, tokenizer.rules, tokenizer.vocab_size, output, options, on_progress)
    totals = work.totals
    raise_faults(ConfigError, totals.faults or totals.split_faults(options.valid_fraction))
    # Token counts, then the description.
    for name, counts in totals.counts.items():
        output.put(f"{name}/{COUNTS_FILE}", _npy(counts))
    meta = DatasetMeta(
        recipe=recipe,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.rules.eod_id,
        dtype=token_dtype(tokenizer.vocab_size),
        splits=totals.splits(),
        valid_entropy=totals.valid_entropy(),
        source=SourceMeta(
            inputs=options.inputs,
            num_files=len(files),
            num_bytes=sum(file.num_bytes for file in files),
            num_replaced=totals.num_replaced,
            num_tokenizer_bytes=choice.is_trained * sum(len(text.encode()) for text in sample),
        ),
        tokenizer=tokenizer.meta,
    )
    return meta, work


def _tokenize(
    groups: Sequence[ShardGroup],
    rules: EncodingRules,
    vocab_size: int,
    output: Output,
    options: PrepareOptions,
    on_progress: OnProgress,
) -> _Work:
    """Write the shards on the cluster, one task per group."""
    on_progress("starting Ray", 0, 1)
    started, fraction = monotonic(), options.valid_fraction
    with session_at(options.address):
        ray_start_seconds = monotonic() - started
        # Where the fast engine is disproved in one group, no group is left as it wrote it.
        for is_fast in (True, False):
            totals = Totals(vocab_size)
            on_progress("tokenising", 0, len(groups))
            for done in _run_groups(groups, output, fraction, rules, is_fast=is_fast):
                totals.add(done)
                on_progress("tokenising", totals.num_groups, len(groups))
                if done.is_disproved:
                    break
            else:
                break
            log.warning("gigatoken differs from tokenizers here; tokenizers writes all shards")
    return _Work(totals=totals, ray_start_seconds=ray_start_seconds)


def _draw_sample(
    groups: Sequence[ShardGroup], options: PrepareOptions, target: int, on_progress: OnProgress
) -> list[str]:
    """Return texts of the training split to train or check a tokenizer on; none if it needs none.

    Groups are random samples of the corpus, so the first ``target`` bytes represent it.
    """
    texts: list[str] = []
    num_bytes = 0
    documents = chain.from_iterable(map(read_documents, groups))
    while num_bytes < target:
        document = next(documents, None)
        if document is None:
            break
        if split_of(document.name, options.valid_fraction) == "train":
            texts.append(document.text)
            num_bytes += document.num_bytes
            on_progress("sampling", min(num_bytes, target), target)
    return texts


def _run_groups(
    groups: Sequence[ShardGroup],
    output: Output,
    valid_fraction: float,
    rules: EncodingRules,
    *,
    is_fast: bool,
) -> Iterator[GroupDone]:
    """Run one task per group and yield the results of the tasks as Ray Data returns them."""
    # Ray Data's own progress bars and log lines would break into the command's.
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    write = partial(write_group, valid_fraction=valid_fraction, rules=rules, is_fast=is_fast)
    run = partial(_run_task, output=output, write=write)
    # One block a group, so that each group is a task of its own.
    items = ray.data.from_items(list(groups), override_num_blocks=len(groups))
    for row in items.map(run, num_cpus=1).iter_rows():
        yield row["item"]


def _run_task(
    row: dict[str, Any], *, output: Output, write: Callable[..., GroupDone]
) -> dict[str, Any]:
    """Run a group's task on a row of Ray Data, a dict whose only value is the group."""
    group: ShardGroup = row["item"]
    try:
        with output.task_folder() as folder:
            done = write(group, folder=folder)
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
