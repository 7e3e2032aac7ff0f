"""Checks a job's data in the driver before any worker starts; loads no torch.

It owns the checks. The facts about one dataset come from `raymega.data.format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from raymega.config.data import (
    MEGATRON,
    NO_PATH,
    SYNTHETIC_PATH,
    DataSection,
    is_computed,
    source_name,
)
from raymega.config.hub import download, hub_name
from raymega.config.preference import REFERENCE_FREE, PreferenceSection
from raymega.config.schema import PluginsSection
from raymega.config.vision.section import VisionSection
from raymega.data.blends.epochs import cache_need, epoch_faults, read_splits
from raymega.data.distillation.stored_logits import logit_faults
from raymega.data.format import (
    META_FILE,
    TOKENIZER_FILE,
    DatasetMeta,
    local_folder,
    read_meta,
    size_faults,
)
from raymega.data.heads.checks import image_faults, label_faults, row_form_faults
from raymega.data.heads.form import form_of_values
from raymega.data.megatron import MegatronStream, is_megatron, megatron_faults, megatron_identity
from raymega.data.open_split import (
    answer_cut,
    missing_split,
    no_documents,
    shape_of,
    short_split,
    split_key,
)
from raymega.data.preference.dataset_folder import has_folder, no_folder
from raymega.data.preference.stored_reference import read_reference
from raymega.data.streaming.remote_dataset import (
    is_remote,
    meta_at,
    missing_shards,
)
from raymega.data.synthetic import SYNTHETIC_VOCAB_SIZE
from raymega.errors import ConfigError, Fault, RaymegaError
from raymega.plan.batch import samples_after
from raymega.storage.registry import open_store, reading_faults

MIN_BPE_VOCAB_SIZE = 257
"""Smallest BPE vocabulary: the 256 bytes and the end-of-document token."""


def data_faults(
    path: str,
    *,
    seq_len: int,
    vocab_size: int,
    splits: Sequence[str] = ("train",),
    is_packed: bool = False,
    field: str = "data.path",
) -> list[Fault]:
    """Return all faults of the dataset at ``path``.

    Args:
        path: Path of a dataset, as ``data.path``.
        seq_len: Value of ``data.seq_len``; 0 if unknown, then not checked.
        vocab_size: Value of ``model.vocab_size``; 0 if unknown, then not checked.
        splits: Splits that the job reads: ``valid`` if it evaluates on the dataset.
        is_packed: True if the job packs documents, which needs a dataset with document lengths.
        field: Field of the job that has the path.
    """
    wants = _Wants(
        field=field,
        seq_len=seq_len,
        vocab_size=vocab_size,
        splits=splits,
        is_packed=is_packed,
    )
    if is_computed(path):
        return _computed_faults(path, wants)
    if is_megatron(path):
        return _megatron_faults(path, wants)
    try:
        if is_remote(path):
            return _remote_faults(path, wants)
        folder = local_folder(path)
        if not (folder / META_FILE).is_file():
            return [_not_prepared(path, folder, wants)]
        meta = read_meta(folder)
    except RaymegaError as error:
        return [fault for fault in error.faults if isinstance(fault, Fault)]
    return [*_content_faults(path, meta, wants), *size_faults(folder, meta)]


def dataset_identity(path: str) -> str:
    """Return a digest of the dataset's content, 16 characters; the same for every copy of it.

    Tokens that no file holds have their path as identity.

    Raises:
        ConfigError: There is no dataset at ``path``.
    """
    if is_computed(path):
        return path
    if is_megatron(path):
        return megatron_identity(path)
    # The order of shards is part of the content; their paths are not.
    shards = [
        (name, shard.num_tokens, shard.crc32)
        for name, split in sorted(meta_at(path).splits.items())
        for shard in split.shards
    ]
    return blake2b(repr(shards).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wants:
    """Requirements of the job on its data; see :func:`data_faults`."""

    field: str
    seq_len: int
    vocab_size: int
    splits: Sequence[str]
    is_packed: bool


def _computed_faults(path: str, wants: _Wants) -> list[Fault]:
    """Return the faults of built-in tokens, or of a data source of a plug-in, whose rows are checked as they come."""
    name = source_name(path)
    if name == SYNTHETIC_PATH:
        return _vocabulary_faults(path, SYNTHETIC_VOCAB_SIZE, wants)
    return []


def _remote_faults(path: str, wants: _Wants) -> list[Fault]:
    """Return the faults of a dataset in an object store, or those of a store that is unreadable."""
    # An unreachable store has one fault, not one a shard.
    refusals = reading_faults(path, field=wants.field)
    if refusals:
        return refusals
    meta = meta_at(path)
    return [*_content_faults(path, meta, wants), *missing_shards(path, meta)]


def _megatron_faults(path: str, wants: _Wants) -> list[Fault]:
    found = megatron_faults(path)
    if found:
        return found
    shards = MegatronStream(path.removeprefix(MEGATRON)).shards
    sizes = [shard.num_tokens for shard in shards] or [0]
    # packed rows need any token, windows a whole one
    least = 0 if wants.is_packed else wants.seq_len
    is_short = wants.seq_len > 0 and max(sizes) <= least
    return [
        *([missing_split(path, "valid")] if "valid" in wants.splits else []),
        *([short_split(path, "train", sizes, wants.seq_len)] if is_short else []),
    ]


def _content_faults(path: str, meta: DatasetMeta, wants: _Wants) -> list[Fault]:
    lacks_valid = "valid" in wants.splits and "valid" not in meta.splits
    lacks_documents = wants.is_packed and not meta.has_documents
    return [
        *([missing_split(path, "valid")] if lacks_valid else []),
        *([no_documents(path, field=wants.field)] if lacks_documents else []),
        *_vocabulary_faults(path, meta.vocab_size, wants),
        *([] if wants.is_packed else _length_faults(path, meta, wants)),
    ]


def _not_prepared(path: str, folder: Path, wants: _Wants) -> Fault:
    rule = f"it must be `{SYNTHETIC_PATH}`, {MEGATRON}PREFIX or a folder with the {META_FILE} of a prepared dataset"
    # bytes and their end-of-document token are the smallest vocabulary, and may need more rows
    size = wants.vocab_size or 32768
    is_small = size < MIN_BPE_VOCAB_SIZE
    command = (
        f"raymega data prepare {{}} --out {{}} --tokenizer {'bytes' if is_small else f'bpe:{size}'}"
    )
    also = f", and set model.vocab_size={MIN_BPE_VOCAB_SIZE}" if is_small else ""
    if not folder.exists():
        fact = f"{wants.field}={path!r} does not exist"
        source, first = "INPUT...", ""
        if name := hub_name(path):
            fetch, source = download(name, "dataset")
            first = f"nothing is read from the Hub; `{fetch}`, then "
            path, also = f"{source}-tokens", f"{also} and {wants.field}={source}-tokens"
        line = command.format(source, path)
        return Fault(fact=fact, rule=rule, remedy=f"{first}run `{line}`{also}")
    prepared = f"{path.rstrip('/')}-tokens"
    line = command.format(path, prepared)
    return Fault(
        fact=f"{wants.field}={path!r} has no {META_FILE}",
        rule=f"{rule}; raw text is not read, nor a preparation that did not finish",
        remedy=f"run `{line}` and set {wants.field}={prepared}{also}",
    )


def _vocabulary_faults(path: str, tokens: int, wants: _Wants) -> list[Fault]:
    rows = wants.vocab_size
    if rows == 0 or tokens <= rows:
        return []
    return [
        Fault(
            fact=f"model.vocab_size={rows}",
            rule=f"{wants.field}={path!r} has tokens up to {tokens - 1}, so it must be at least "
            f"{tokens}",
            remedy=f"set model.vocab_size={tokens}; the table is padded by itself",
        )
    ]


def _length_faults(path: str, meta: DatasetMeta, wants: _Wants) -> list[Fault]:
    sizes = {
        name: [shard.num_tokens for shard in split.shards]
        for name, split in meta.splits.items()
        if name in wants.splits
    }
    return [
        short_split(path, name, tokens, wants.seq_len)
        for name, tokens in sizes.items()
        if wants.seq_len > 0 and max(tokens) <= wants.seq_len
    ]


def training_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return all faults of a job's datasets: of each by itself, of all together, of a blend's epochs.

    Args:
        values: Fields of the job that are valid, by dotted path. What a missing one decides is not
            checked.
    """
    sizes = {"seq_len": 0, "global_batch_size": 0}
    found = {
        name: values[f"data.{name}"]
        for name in DataSection.model_fields
        if f"data.{name}" in values
    }
    section = DataSection.model_construct(**(sizes | found))
    if not section.sources and section.path == NO_PATH:
        return []
    is_packed, is_evaluating = section.packing != "none", values.get("run.eval_samples", 0) > 0
    vocab_size = values.get("model.vocab_size", 0)
    named = section.validation if is_evaluating else ()
    check = partial(
        data_faults, seq_len=section.text_len, vocab_size=vocab_size, is_packed=is_packed
    )
    splits = read_splits(section, is_evaluating=is_evaluating)
    held = [] if named else [path for path, split in splits if split == "valid"]
    faults = [
        fault
        for path, field in section.datasets.items()
        for fault in check(path, field=field, splits=("train",) + ("valid",) * (path in held))
    ]
    for number, entry in enumerate(named):
        field = f"data.validation[{number}].path"
        faults += check(entry.path, field=field, splits=(entry.split,))
    form = form_of_values(values)
    # what follows reads datasets that are sound by themselves
    if faults:
        return faults
    fields = section.datasets | {
        entry.path: f"data.validation[{number}].path" for number, entry in enumerate(named)
    }
    has_reference = values.get("preference.loss_type", "none") not in REFERENCE_FREE
    if has_reference and values.get("preference.reference") == "stored":
        faults = [*_stored_faults(section, splits, values["preference.loss_type"])]
        if faults:
            return faults
    if values.get("distillation.loss_type", "none") != "none" and (
        values.get("distillation.teacher") == "stored"
    ):
        wanted = {"top_k": values.get("distillation.top_k", 1), "vocab_size": vocab_size}
        faults = [
            each for path in section.datasets for each in logit_faults(path, section, **wanted)
        ]
        if faults:
            return faults
    faults = [
        *_cache_faults(section, splits),
        *(
            fault
            for path, field in fields.items()
            for fault in row_form_faults(path, field, section.loss_on, form)
        ),
        *(
            fault
            for path, field in fields.items()
            for fault in image_faults(path, field, values.get("model.vision", VisionSection()))
        ),
    ]
    faults += [] if faults else [each for path in fields for each in label_faults(path, form)]
    is_blend = bool(section.sources or section.stages)
    if not faults:
        faults = [*(_copy_faults(section) if is_blend else ()), *_tokenizer_faults(fields)]
    if faults or not (is_blend and section.global_batch_size and section.seq_len):
        return faults
    num_samples = samples_after(values.get("run.steps", 0), section)
    plugins = PluginsSection(options=values.get("plugins.options", {}))
    seed = values.get("run.seed", 0)
    return list(
        epoch_faults(section, seed=seed, num_samples=num_samples, plugins=plugins, form=form)
    )


def _stored_faults(
    section: DataSection, splits: Sequence[tuple[str, str]], loss: str
) -> Iterator[Fault]:
    """Yield a fault for each split without stored reference log-probabilities of its answers as the job cuts them."""
    preference = PreferenceSection.model_validate({"loss_type": loss, "reference": "stored"})
    wanted = answer_cut(shape_of(section, preference))
    for path, split in splits:
        if not has_folder(path):
            yield no_folder(
                "preference.reference=stored with ", path, stored="reference log-probabilities lie",
                other="preference.reference=base for adapters",
            )  # fmt: skip
            continue
        try:
            read_reference(path, split, wanted, content=split_key(meta_at(path), split))
        except ConfigError as error:
            yield from error.faults


def _cache_faults(section: DataSection, splits: Sequence[tuple[str, str]]) -> Iterator[Fault]:
    """Yield a fault if the cache of a node does not hold two blocks of each dataset."""
    need = sum(cache_need(path, split, section) for path, split in splits)
    if need > section.cache_bytes:
        yield Fault(
            fact=f"data.cache_bytes={section.cache_bytes}",
            rule=f"a node needs {need} bytes: two blocks of data.shuffle_block_bytes={section.shuffle_block_bytes}, "
            "or all, of each dataset in an object store",
            remedy=f"set data.cache_bytes={need}, or a smaller data.shuffle_block_bytes in a run that begins",
        )


def _copy_faults(section: DataSection) -> Iterator[Fault]:
    """Yield a fault for each dataset that has another path too: their samples would be the same."""
    seen: dict[str, str] = {}
    for path, field in section.datasets.items():
        other = seen.setdefault(dataset_identity(path), path)
        if other != path:
            yield Fault(
                fact=f"{field}={path!r} is the dataset {section.datasets[other]}={other!r}",
                rule="a blend has each dataset once: two entries would read the same samples",
                remedy="make them one entry with the sum of the weights",
            )


def _tokenizer_faults(fields: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each dataset of another tokenizer than the first that has one; ``fields`` are by path."""
    found = {path: tokenizer_digest(path) for path in fields}
    known = {path: digest for path, digest in found.items() if digest}
    first = next(iter(known), "")
    for path, digest in known.items():
        if digest != known[first]:
            yield Fault(
                fact=f"{fields[path]}={path!r} has another {TOKENIZER_FILE} than {first!r}",
                rule="the datasets of a run share the model's vocabulary",
                remedy=f"prepare it again with --tokenizer {first}/{TOKENIZER_FILE}",
            )


def tokenizer_digest(path: str) -> str:
    """Return a digest of the dataset's tokenizer; empty for one without a tokenizer."""
    if is_computed(path) or is_megatron(path):
        return ""
    store = open_store(path if is_remote(path) else str(local_folder(path)))
    try:
        return blake2b(store.get(TOKENIZER_FILE), digest_size=8).hexdigest()
    except KeyError:
        return ""
