"""Runs `raymega data prepare`: from text to a committed dataset, on Ray Data.

It owns the order of the phases; the phases are in the other modules of `raymega.prepare`. What is
finished is kept in the output, so that a preparation that was killed or refused continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic

from isal import isal_zlib

from raymega.data.arrow import token_dtype
from raymega.data.format import (
    COUNTS_FILE,
    LENGTHS_FILE,
    TOKENIZER_FILE,
    DatasetMeta,
    ShardMeta,
    SourceMeta,
    SplitMeta,
    lengths_meta,
)
from raymega.errors import ConfigError, Fault, RaymegaError, StorageError, raise_faults
from raymega.prepare.assembly import ShardPlan, plan_shards, source_labels, write_shard
from raymega.prepare.cluster import on_cluster
from raymega.prepare.groups import make_groups, with_keys
from raymega.prepare.options import Output, PrepareOptions, output_at, plan_work
from raymega.prepare.origins import SOURCES_FILE, encode_sources
from raymega.prepare.readers.pieces import ShardGroup, SourceFile
from raymega.prepare.records import DISPROVED_FILE
from raymega.prepare.sample import draw_sample
from raymega.prepare.shards import ORIGINS_SUFFIX, GroupDone, encode_array, write_group
from raymega.prepare.tokenizer.choice import DatasetTokenizer, TokenizerChoice, make_tokenizer
from raymega.prepare.tokenizer.encoder import EncodingRules
from raymega.prepare.totals import Totals
from raymega.session import session_at

log = logging.getLogger(__name__)

# Groups with damaged files after which the others are not started.
MAX_FAULTY_GROUPS = 20
# Shards are joined on the cluster from this number on.
MANY_SHARDS = 5
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Result of a preparation.

    Attributes:
        uri: Folder or URI of the dataset.
        meta: Description of the dataset.
        seconds: Duration of the whole preparation.
        ray_start_seconds: Part of it until Ray was connected or started.
        engines: Number of groups that each engine encoded, now or before an interruption.
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

    The same inputs and options give the same shards, byte for byte, for any number of CPUs, and
    wherever an earlier preparation was killed. Memory is bounded by the largest document times the
    CPUs, and the sample of the tokenizer.

    Args:
        options: Options of the preparation.
        on_progress: Callback with (phase, done, total) during the work.

    Raises:
        ConfigError: An option, an input or the output is invalid; nothing was committed, and
            finished groups are kept.
        DataError: The output holds a finished dataset whose shards are missing or damaged.
        StorageError: The output's object store fails.
    """
    started = monotonic()
    output = output_at(options.out)
    # Check everything; a finished dataset of the same recipe is the result.
    choice, recipe, files = plan_work(options, output)
    meta = output.find_finished(recipe)
    if meta is not None:
        # Left by a preparation that was killed after its commit.
        output.clean()
        seconds = monotonic() - started
        return Prepared(uri=output.uri, meta=meta, seconds=seconds, is_cached=True)
    # Otherwise claim the output, write the data, and commit.
    output.claim(recipe)
    work = _write_dataset(options, choice, recipe, output, files, on_progress)
    output.commit(work.meta)
    return Prepared(
        uri=output.uri, meta=work.meta, seconds=monotonic() - started, is_cached=False,
        ray_start_seconds=work.ray_start_seconds, engines=work.engines,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Description of the dataset that was written, and what is told of the work."""

    meta: DatasetMeta
    ray_start_seconds: float
    engines: dict[str, int]


def _write_dataset(
    options: PrepareOptions,
    choice: TokenizerChoice,
    recipe: dict[str, str],
    output: Output,
    files: Sequence[SourceFile],
    on_progress: OnProgress,
) -> _Work:
    """Write everything but dataset.json, whose content is returned."""
    # Tokenizer: trained or checked on a sample, or given.
    sample = draw_sample(
        files,
        options,
        num_bytes=choice.sample_bytes,
        on_progress=partial(on_progress, "sampling"),
    )
    tokenizer = make_tokenizer(choice, sample)
    dtype = token_dtype(tokenizer.vocab_size)
    groups = _group_files(files, options)
    on_progress("starting Ray", 0, 1)
    started = monotonic()
    with session_at(options.address):
        ray_start_seconds = monotonic() - started
        totals = _tokenize(groups, recipe, tokenizer, output, options, on_progress)
        raise_faults(ConfigError, totals.faults() or totals.split_faults(options.valid_fraction))
        # Join what the groups wrote.
        plans = plan_shards(
            groups,
            [totals.reports[group.index] for group in groups],
            tokenizer.rules.images,
        )
        shards = _join(plans, output, dtype, on_progress)
    # Lengths of documents, token counts and small files, then the description.
    splits = totals.splits(shards)
    splits = {name: _with_lengths(name, split, output) for name, split in splits.items()}
    for name, counts in totals.counts.items():
        output.put(f"{name}/{COUNTS_FILE}", [encode_array(counts)])
    for name, content in tokenizer.files.items():
        output.put(name, [content])
    output.put(SOURCES_FILE, [encode_sources(source_labels(groups))])
    meta = DatasetMeta(
        recipe=recipe,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.rules.eod_id,
        dtype=dtype,
        splits=splits,
        valid_entropy=totals.valid_entropy(),
        source=SourceMeta(
            inputs=options.inputs,
            num_files=len(files),
            num_bytes=sum(file.num_bytes for file in files),
            num_replaced=totals.num_replaced,
            num_tokenizer_bytes=choice.is_trained * sum(len(text.encode()) for text in sample),
            num_bad_lines=totals.num_bad,
        ),
        tokenizer=tokenizer.meta,
        version=2 if options.row_format == "text" else 3,
        row_format=options.row_format,
        images=tokenizer.rules.images,
    )
    return _Work(meta=meta, ray_start_seconds=ray_start_seconds, engines=totals.engines)


def _tokenize(
    groups: Sequence[ShardGroup],
    recipe: dict[str, str],
    tokenizer: DatasetTokenizer,
    output: Output,
    options: PrepareOptions,
    on_progress: OnProgress,
) -> Totals:
    """Write the tokens of the groups that are not finished yet, one task per group."""
    depends = _what_tokens_depend_on(recipe, tokenizer)
    for is_fast in (False,) if output.has_state(DISPROVED_FILE) else (True, False):
        # Where the engines differ, other keys leave behind all that was written while the fast one was
        # trusted, and what its tasks may still write.
        keyed = with_keys(groups, depends if is_fast else depends | {"engine": "tokenizers"})
        totals = Totals(tokenizer.vocab_size, max_bad_lines=options.max_bad_lines)
        for done in output.find_done(keyed):
            totals.add(done)
        output.put_state(TOKENIZER_FILE, tokenizer.files[TOKENIZER_FILE])
        on_progress("tokenising", totals.num_groups, len(groups))
        pending = [group for group in keyed if group.index not in totals.reports]
        for done in _run_groups(pending, output, options, tokenizer.rules, is_fast=is_fast):
            if done.is_disproved:
                break
            totals.add(done)
            on_progress("tokenising", totals.num_groups, len(groups))
            # A damaged file does not stop the other groups, as they are kept; a wrong --text-key does.
            if totals.has_too_many_bad or len(totals.faulty) >= MAX_FAULTY_GROUPS:
                return totals
            _tell(done)
        else:
            break
        log.warning("gigatoken differs from tokenizers here; tokenizers writes all shards")
        output.put_state(DISPROVED_FILE, b"gigatoken differs from tokenizers on this corpus\n")
    return totals


def _group_files(files: Sequence[SourceFile], options: PrepareOptions) -> list[ShardGroup]:
    try:
        return make_groups(files, text_key=options.text_key, row_format=options.row_format)
    except OSError as error:
        raise ConfigError(unopened(error)) from error


def _what_tokens_depend_on(recipe: dict[str, str], tokenizer: DatasetTokenizer) -> dict[str, str]:
    """Return the recipe of a group: without the other files, and with the tokenizer as it was made."""
    crc32 = f"{isal_zlib.crc32(tokenizer.files[TOKENIZER_FILE]):08x}"
    return {key: value for key, value in recipe.items() if key != "inputs"} | {"tokenizer": crc32}


def _tell(done: GroupDone) -> None:
    # At once, as the other groups may take days.
    for line in done.bad:
        log.warning("bad line left out: %s", line)
    for fault in done.faults:
        log.warning("%s", fault.fact)


def _run_groups(
    groups: Sequence[ShardGroup],
    output: Output,
    options: PrepareOptions,
    rules: EncodingRules,
    *,
    is_fast: bool,
) -> Iterator[GroupDone]:
    """Run one task per group and yield the results of the tasks as Ray Data returns them."""
    write = partial(
        write_group,
        valid_fraction=options.valid_fraction,
        rules=rules,
        max_bad_lines=options.max_bad_lines,
        is_fast=is_fast,
    )
    run = partial(_run_group, output=output, write=write)
    yield from on_cluster(groups, run)


def _run_group(group: ShardGroup, *, output: Output, write: Callable[..., GroupDone]) -> GroupDone:
    """Tokenise a group and note that it is finished."""
    try:
        with output.task_folder() as folder:
            done = write(group, folder=folder)
        # The record comes last: what it names is whole.
        if not (done.faults or done.is_disproved):
            output.put_record(group.key, done)
    except (StorageError, OSError) as error:
        # A failed write is a fault in the report, as the errors that write_group catches.
        done = GroupDone(index=group.index, faults=_faults_of(error))
    return done


def _join(
    plans: Sequence[ShardPlan], output: Output, dtype: str, on_progress: OnProgress
) -> list[ShardMeta]:
    """Write the dataset's shards: a few here, many on the cluster."""
    run = partial(_run_join, output=output, dtype=dtype)
    shards, results = list[ShardMeta](), map(run, plans)
    for number, result in enumerate(
        results if len(plans) < MANY_SHARDS else on_cluster(plans, run), start=1
    ):
        if isinstance(result, RaymegaError):
            raise result
        shards += [result] if result else []
        on_progress("joining", number, len(plans))
    return shards


def _run_join(plan: ShardPlan, *, output: Output, dtype: str) -> ShardMeta | RaymegaError | None:
    """Write one shard, and the lengths of its documents beside; an error is a value, because Ray Data would wrap it."""
    files = {part.shard.file for part in plan.parts}
    files |= {str(Path(file).with_suffix(ORIGINS_SUFFIX)) for file in files}
    try:
        with output.shard_folders(sorted(files)) as (state, folder):
            written = write_shard(plan, state=state, folder=folder, dtype=dtype)
        if written is None:
            return None
        shard, lengths = written
        # in the state: the split's file of lengths is joined when all shards are there
        output.put_state(_lengths_name(shard), lengths)
        return shard
    except RaymegaError as error:
        return error
    except OSError as error:
        return ConfigError(*_faults_of(error))


def _with_lengths(name: str, split: SplitMeta, output: Output) -> SplitMeta:
    """Write a split's file of lengths from what was left for each shard, and return the description with it."""
    crc32 = 0

    def pieces() -> Iterator[bytes]:
        nonlocal crc32
        for shard in split.shards:
            piece = output.get_state(_lengths_name(shard))
            crc32 = isal_zlib.crc32(piece, crc32)
            yield piece

    output.put(f"{name}/{LENGTHS_FILE}", pieces())
    return replace(split, lengths=lengths_meta(name, split.shards, crc32=crc32))


def _lengths_name(shard: ShardMeta) -> str:
    """Return the name below ``_state`` of the lengths of a shard's documents."""
    return str(Path(shard.file).with_suffix(Path(LENGTHS_FILE).suffix))


def _faults_of(error: RaymegaError | OSError) -> tuple[Fault, ...]:
    if isinstance(error, OSError):
        return (_unwritten(error),)
    return tuple(fault for fault in error.faults if isinstance(fault, Fault))


def unopened(error: OSError) -> Fault:
    """Return the fault of a large file that cannot be opened to cut it."""
    return Fault(
        fact=f"a large file cannot be cut: {error}",
        rule="every node must be able to read the inputs",
        remedy="correct its permissions, or leave it out with --exclude",
    )


def _unwritten(error: OSError) -> Fault:
    return Fault(
        fact=f"{type(error).__name__}: {error}",
        rule="every node must be able to write to --out, with room for twice the tokens",
        remedy="put it where every node sees it, with enough room; finished work is kept",
    )
