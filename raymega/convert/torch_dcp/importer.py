"""Imports a folder of torch.distributed.checkpoint as a native checkpoint, moments included.

Everything is checked before the first byte is written, and what was written is removed when something
fails later. Memory: one block, or a whole tensor where rows are reordered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raymega.box import Box
from raymega.checkpoint.format.coverage import uncovered_cells
from raymega.checkpoint.format.dtypes import ELEMENT_TYPES
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.config.schema import ModelSection
from raymega.convert.native import Header, State, TensorSource, occupied_faults, write_checkpoint
from raymega.convert.number_formats import Array, recast, storage_type
from raymega.convert.torch_dcp.names import (
    DIALECTS,
    STEP,
    Dialect,
    Meaning,
    dialect_faults,
    is_reordered,
    meaning_of,
    padded_rows,
    reorder_rope_rows,
)
from raymega.convert.torch_dcp.reader import DcpBlock, DcpFolder, DcpTensor, open_dcp
from raymega.errors import ConfigError, Fault, first_few, raise_faults
from raymega.plan.init_from_rules import matches
from raymega.plan.rename_rules import make_renames, rename_faults
from raymega.plan.tensor_table import model_tensors
from raymega.storage.registry import open_store, store_faults

BESIDE = "raymega.json"
"""Name of the file that our exports add: position, job and grid, which torch's format cannot hold."""
NUM_NAMED = 5
"""Largest number of tensors that an error message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Options of an import.

    Attributes:
        names: Key of DIALECTS: the names of tensors in the folder.
        rename: Rules OLD=NEW for names of weights, applied before the dialect's own.
        ignore: Patterns of entries that are not imported.
        model: Model section that the tensors must match; None accepts them as they are.
        position: Step, samples and tokens of the run, where they override those of the folder.
    """

    names: str = "raymega"
    rename: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    model: ModelSection | None = None
    position: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpImport:
    """Result of an import.

    Attributes:
        uri: URI of the store that was written.
        key: Key of the manifest.
        state: Scalars of the trainer with which a run would resume.
        kinds: Kinds of the tensors: weights and moments.
        num_parameters: Number of elements of the weights.
        left_out: Names of the folder's entries that were not imported.
    """

    uri: str
    key: str
    state: State
    kinds: tuple[str, ...]
    num_parameters: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A tensor of the folder, and the tensor of a run that it becomes."""

    tensor: DcpTensor
    meaning: Meaning


def dcp_import(folder: Path, uri: str, reading: Reading, *, created: str) -> DcpImport:
    """Convert the checkpoint in ``folder`` to one in the store at ``uri``.

    Args:
        folder: Folder that torch.distributed.checkpoint wrote.
        uri: URI of a store without checkpoints.
        reading: Options: names, rules, model and position.
        created: Time of the import: ISO 8601, UTC.

    Raises:
        ConfigError: The folder or the arguments are refused, with all reasons. Nothing was written,
            and no code of a pickle was run.
        StorageError: The store cannot be used.
    """
    # The options, completed by what an export of ours left in the folder.
    beside = _read_beside(folder)
    reading = replace(reading, model=reading.model or _carried_model(beside))
    faults = [*dialect_faults(reading.names, reading.model)]
    raise_faults(ConfigError, faults + rename_faults("--rename", reading.rename))
    # Sort the entries, and check them against the rules and the model.
    held = open_dcp(folder)
    entries, left_out = _sort(held, reading)
    taken = [entry for entry in entries if entry.meaning.kind != STEP]
    dialect = DIALECTS[reading.names]
    pads = padded_rows(reading.model, dialect) if reading.model else {}
    misread = [*_idle_rules(held, reading), *_order_faults(taken, reading.names)]
    raise_faults(ConfigError, [*misread, *_entry_faults(taken), *_set_faults(taken, reading, pads)])
    # Check the store, and write.
    raise_faults(ConfigError, store_faults(uri, field="--out"))
    store = open_store(uri)
    raise_faults(ConfigError, occupied_faults(store))
    header = Header(
        state=_state(beside, entries, reading), job=_job(beside, reading, taken), created=created,
        grid=dict(beside.get("grid", {})),
    )  # fmt: skip
    sources = [source for entry in taken for source in _sources(entry, reading, dialect, pads)]
    key = write_checkpoint(store, sources, header)
    weights = [entry.tensor for entry in taken if entry.meaning.kind == WEIGHTS]
    return DcpImport(
        uri=store.uri, key=key, state=header.state,
        kinds=tuple(dict.fromkeys(entry.meaning.kind for entry in taken)),
        num_parameters=sum(int(np.prod(tensor.shape)) for tensor in weights), left_out=left_out,
    )  # fmt: skip


def _read_beside(folder: Path) -> dict[str, Any]:
    path = folder / BESIDE
    if not path.is_file():
        return {}
    try:
        beside: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(beside[name], dict) for name in ("state", "job", "grid")):
            return beside
        cause = "its parts are no mappings"
    except (ValueError, KeyError, TypeError) as error:
        cause = repr(error)
    raise ConfigError(
        fact=f"{str(path)!r} cannot be read: {cause}",
        rule="an export leaves position, job and grid there",
        remedy="take it away to import the tensors alone, with --step and --samples",
    )


def _carried_model(beside: Mapping[str, Any]) -> ModelSection | None:
    model = beside.get("job", {}).get("model")
    return ModelSection.model_validate_json(json.dumps(model)) if model else None


def _sort(held: DcpFolder, reading: Reading) -> tuple[list[_Entry], tuple[str, ...]]:
    """Return the entries that a run can use, and the sorted names of all others."""
    renames = (*make_renames(reading.rename), *DIALECTS[reading.names].renames)
    entries, left_out = [], list(held.others)
    for name, tensor in held.tensors.items():
        meaning = meaning_of(name, renames)
        if meaning.kind and not matches(name, reading.ignore):
            entries.append(_Entry(tensor=tensor, meaning=meaning))
        else:
            left_out.append(name)
    return entries, tuple(sorted(left_out))


def _idle_rules(held: DcpFolder, reading: Reading) -> Iterator[Fault]:
    """Yield the faults of rules that match nothing, most likely because of a misspelling."""
    weights = [meaning_of(name, ()).weight for name in held.tensors]
    for text, rule in zip(reading.rename, make_renames(reading.rename), strict=True):
        if all(rule.apply(weight) is None for weight in weights):
            yield _fault(
                f"--rename {text!r} fits no weight of the folder",
                "a rule names the begin of a weight's dotted name, without a leading app. or model.",
                f"correct it, or leave it out; the folder has {_first(weights)}",
            )
    for pattern in reading.ignore:
        if not any(matches(name, [pattern]) for name in (*held.tensors, *held.others)):
            yield _fault(
                f"--ignore {pattern!r} fits no entry of the folder",
                "a pattern fits an entry's whole name, and * any part of it",
                f"correct it, or leave it out; the folder has {_first(tuple(held.tensors))}",
            )


def _first(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names))[:NUM_NAMED])


def _order_faults(taken: Sequence[_Entry], names: str) -> Iterator[Fault]:
    """Yield the fault of a folder with raymega's names that is read with another dialect.

    Rows of q and k would be reordered wrongly, and no shape would show it.
    """
    # The dialect must have renamed every reordered tensor; an unchanged name is already ours.
    ours = [
        entry.tensor.name
        for entry in taken
        if is_reordered(entry.meaning.saved_name, DIALECTS[names])
        and meaning_of(entry.tensor.name, ()).weight == entry.meaning.weight
    ]
    if ours:
        yield _fault(
            f"--names {names}, and the folder has {ours[0]}",
            f"{names} calls it otherwise, and has its rows in another order",
            "use --names raymega, or --rename it from what it was called",
        )


def _entry_faults(taken: Sequence[_Entry]) -> Iterator[Fault]:
    """Yield the faults of tensors with an unsupported type, a name twice, or elements missing."""
    sources: dict[str, str] = {}
    for entry in taken:
        tensor, saved = entry.tensor, entry.meaning.saved_name
        if tensor.dtype not in (*ELEMENT_TYPES, "float16") or not tensor.shape:
            yield _fault(
                f"{tensor.name} is {tensor.dtype} {tensor.shape}",
                f"checkpoints hold tensors of {', '.join(ELEMENT_TYPES)}",
                f"leave it behind with --ignore '{tensor.name}'",
            )
            continue
        if saved in sources:
            yield _fault(
                f"{sources[saved]} and {tensor.name} are both {saved} here",
                "a tensor has one source", "correct --rename, or --ignore one of them",
            )  # fmt: skip
        sources[saved] = tensor.name
        # Every element exactly once.
        whole = Box.whole(tensor.shape)
        for cell, count in uncovered_cells(whole, [block.box for block in tensor.blocks]):
            yield _fault(
                f"{tensor.name} has its block {cell.shape} at {cell.offset} {count} times",
                "every element must be there once", "save it again",
            )  # fmt: skip


def _set_faults(
    taken: Sequence[_Entry], reading: Reading, pads: Mapping[str, int]
) -> Iterator[Fault]:
    """Yield a fault for each kind whose tensors are not exactly those of the model, or of the weights."""
    # Found shapes by kind and name.
    shapes: dict[str, dict[str, tuple[int, ...]]] = {WEIGHTS: {}}
    for entry in taken:
        shapes.setdefault(entry.meaning.kind, {})[entry.meaning.weight] = entry.tensor.shape
    # Wanted shapes: the model section's without padding, or without one those of the weights.
    wanted, whose = shapes[WEIGHTS], "the weights'"
    if reading.model is not None:
        whose = "the model section's"
        wanted = {
            at.name: (at.shape[0] - pads.get(at.name, 0), *at.shape[1:])
            for at in model_tensors(reading.model)
        }
    for kind, found in shapes.items():
        unlike = [
            f"{name} as {found.get(name, 'nothing')} instead of {wanted.get(name, 'nothing')}"
            for name in sorted(wanted.keys() | found.keys())
            if found.get(name) != wanted.get(name)
        ]
        if unlike or not found:
            yield _fault(
                f"the folder has, as {kind}, {first_few(unlike) or 'nothing'}",
                f"its tensors must be {whose}, all of them and no other",
                "give --names and --rename OLD=NEW, or --ignore what is not to be taken",
            )


def _state(beside: Mapping[str, Any], entries: Sequence[_Entry], reading: Reading) -> State:
    """Return the trainer's scalars: of the options, else of our own export, else the optimizer's count."""
    state: State = {"step": _optimizer_steps(entries), "samples": 0, "tokens": 0}
    return {**state, **beside.get("state", {}), **reading.position}


def _optimizer_steps(entries: Sequence[_Entry]) -> int:
    # torch counts the updates of each tensor by itself.
    counts = {
        int(block.read().item())
        for entry in entries
        if entry.meaning.kind == STEP
        for block in entry.tensor.blocks
    }
    if len(counts) > 1:
        raise ConfigError(
            _fault(
                f"the optimizer made {min(counts)} updates of some tensors and {max(counts)} of others",
                "a run counts its updates once",
                "leave the optimizer behind with --ignore 'optimizer.*'",
            )
        )
    return counts.pop() if counts else 0


def _job(beside: Mapping[str, Any], reading: Reading, taken: Sequence[_Entry]) -> dict[str, object]:
    """Return the job's values as far as they are known, among them the number format of the weights."""
    # The driver refuses a run with fewer digits than precision.dtype says here.
    formats = {_dtype(entry.tensor) for entry in taken if entry.meaning.kind == WEIGHTS}
    widest = max(formats, key=lambda name: ELEMENT_TYPES[name].digits)
    job: dict[str, object] = {"precision": {"dtype": widest}, **beside.get("job", {})}
    if reading.model is not None:
        job["model"] = reading.model.model_dump(mode="json")
    return job


def _sources(
    entry: _Entry, reading: Reading, dialect: Dialect, pads: Mapping[str, int]
) -> Iterator[TensorSource]:
    tensor, saved = entry.tensor, entry.meaning.saved_name
    num_rows, *rest = tensor.shape
    num_padded = pads.get(entry.meaning.weight, 0)
    dtype = _dtype(tensor)
    # The folder's blocks, or one block with the rows of q or k reordered; then padded rows of zeros.
    blocks = {block.box: partial(_read, block, dtype) for block in tensor.blocks}
    if is_reordered(saved, dialect) and reading.model is not None:
        whole = Box.whole(tensor.shape)
        blocks = {whole: partial(_turned, tensor, dtype, reading.model.head_width)}
    if num_padded:
        rows = Box(offset=(num_rows, *(0 for _ in rest)), shape=(num_padded, *rest))
        blocks[rows] = partial(np.zeros, rows.shape, storage_type(dtype))
    for box, read in blocks.items():
        yield TensorSource(
            tensor=saved, dtype=dtype, global_shape=(num_rows + num_padded, *rest), box=box,
            read=read,
        )  # fmt: skip


def _read(block: DcpBlock, dtype: str) -> Array:
    return recast(block.read(), block.dtype, dtype)


def _turned(tensor: DcpTensor, dtype: str, head_width: int) -> Array:
    values = np.empty(tensor.shape, storage_type(dtype))
    whole = Box.whole(tensor.shape)
    for block in tensor.blocks:
        values[block.box.within(whole)] = _read(block, dtype)
    return reorder_rope_rows(values, head_width, to_ours=True)


def _dtype(tensor: DcpTensor) -> str:
    """Return the format in a checkpoint: float32 for float16, which checkpoints do not have."""
    return "float32" if tensor.dtype == "float16" else tensor.dtype


def _fault(fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=fact, rule=rule, remedy=remedy)
