"""Fingerprints of the checkpoints that a run reads again in each restart, which its own checkpoints remember.

A URI names a place, and other weights may be written there. `pinned_source.py` compares places.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np

from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import Job
from raymega.errors import Fault, RaymegaError

log = logging.getLogger(__name__)

BASE, TEACHER = "checkpoint.init_from", "distillation.teacher_checkpoint"
"""Fields that name such checkpoints."""
WEIGHTS = "model/"
"""Begin of the saved names of weights; moments and averages of the run that made a base are no part of it."""
FINGERPRINT = "fingerprint"
"""Key of a teacher's fingerprint in what tells of its stored logits."""
SOURCES = "sources"
"""Key of the fingerprints by field, among the values of a job in a manifest."""


def fingerprint_of(manifest: Manifest) -> str:
    """Return 8 hex digits of the weights in a checkpoint: of the checksums of its boxes, without reading data.

    Copies, and weights that are written again in the same blocks, have the same; weights in other blocks have
    another one. The root of an index is no such manifest: files of the index tell who wrote them.
    """
    assert manifest.index is None, "the boxes are read"
    found = dict[str, int]()
    for tensor, rows in BoxTable.of(manifest.boxes).by_tensor():
        if tensor.name.startswith(WEIGHTS):
            # by place, as ranks commit in any order; the last key decides first
            rows = rows[np.lexsort(rows["offset"].T[::-1])]
            begin = crc32(f"{tensor.name} {tensor.dtype}".encode())
            columns = (rows[name].tobytes() for name in ("offset", "shape", "crc32"))
            found[tensor.name] = crc32(b"".join(columns), begin)
    lines = "\n".join(f"{name} {number:08x}" for name, number in sorted(found.items()))
    return f"{crc32(lines.encode()):08x}"


def fingerprint_at(uri: str) -> str:
    """Return the fingerprint of the newest checkpoint that a URI names.

    Raises:
        ConfigError: The URI names no checkpoint.
        CheckpointError: The manifest or its index cannot be read.
    """
    return fingerprint_of(open_checkpoint(uri).manifest)


def sources_of(job: Job) -> dict[str, str]:
    """Return the fingerprint of each checkpoint that a run of ``job`` reads in each restart, by field."""
    fields = {}
    if job.model.lora.r:
        fields[BASE] = job.checkpoint.init_from
    if job.distillation.is_live:
        fields[TEACHER] = job.distillation.teacher_checkpoint
    found = {}
    for field, uri in fields.items():
        if uri == "none":
            continue
        try:
            found[field] = fingerprint_at(uri)
        except RaymegaError as error:  # workers report what they cannot read
            log.info("no fingerprint of %s: %s", field, error)
    return found


def overwritten_faults(of_run: Manifest, uri: str, *, field: str, remedy: str) -> Iterator[Fault]:
    """Yield the fault of a checkpoint at ``uri`` that holds other weights than the run of a manifest has read.

    Args:
        of_run: Manifest of the run.
        uri: Checkpoint to be read now.
        field: BASE or TEACHER.
        remedy: Remedy to tell.
    """
    told = of_run.job.get(SOURCES)
    began = told.get(field) if isinstance(told, dict) else None
    if began is None or uri == "none":
        return
    try:
        now = fingerprint_at(uri)
    except RaymegaError:  # reported by whoever reads it
        return
    if now != began:
        yield Fault(
            fact=f"{field}={uri!r} holds weights with fingerprint {now}, and {of_run.key} was trained with {began}",
            rule="what was trained on a checkpoint is used with these very weights, wherever they lie",
            remedy=remedy,
        )


def overwritten_start_faults(adapters: Manifest, base: str) -> Iterator[Fault]:
    """Yield the fault of a new run that begins with ``adapters`` over the ``base`` of their run, which was overwritten.

    They may begin over another base than they were trained on, which the job then names.
    """
    section = adapters.job.get("checkpoint")
    began = section.get("init_from", "") if isinstance(section, dict) else ""
    if _is_named(began, base):
        remedy = (
            f"set {BASE} to a copy of the weights of before, or leave checkpoint.init_adapter out"
        )
        # the very checkpoint: a run that is trained further has newer ones beside it
        yield from overwritten_faults(adapters, began, field=BASE, remedy=remedy)


def origin_faults(path: str, how: Mapping[str, Any], uri: str) -> Iterator[Fault]:
    """Yield the fault of a dataset whose stored logits are of another teacher than the job names.

    Args:
        path: The dataset.
        how: Origin of its logits, as the dataset states it; one without a fingerprint is accepted.
        uri: The job's teacher, or ``none``; one that cannot be read is not compared, as a run does not read it.
            Of a run that is trained further it is the checkpoint that made the logits, not the newest.
    """
    if uri == "none" or FINGERPRINT not in how:
        return
    began = str(how.get("checkpoint"))
    try:
        now = fingerprint_at(began if _is_named(began, uri) else uri)
    except RaymegaError:
        return
    if now != how[FINGERPRINT]:
        yield Fault(
            fact=f"{TEACHER}={uri!r}, and the logits beside {path} are of {began}",
            rule="a run with distillation.teacher=stored learns from the logits that lie there, whatever teacher it names",
            remedy=f"set {TEACHER}={began}, or store this one's: raymega data teacher JOB.yaml",
        )


def _is_named(manifest: str, uri: str) -> bool:
    """Return whether a URI is that of a manifest, of its checkpoint or of its run."""
    return f"{manifest}/".startswith(f"{uri.rstrip('/')}/")
