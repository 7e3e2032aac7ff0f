"""Weights that a run begins with from other checkpoints: ``checkpoint.init_from`` and ``init_adapter``.

`train/entry.py` restores a run's own checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from raymega.checkpoint.format.manifest import Manifest, read_blocks
from raymega.checkpoint.load.fingerprint import BASE
from raymega.checkpoint.load.foreign_reads import foreign_read
from raymega.checkpoint.load.init_from import (
    ADAPTER,
    WEIGHTS,
    source_blocks,
    starting_manifest,
    upcycling_of,
)
from raymega.checkpoint.load.reader import boxes_by_name, load
from raymega.checkpoint.load.starting_values import begin_magnitudes, finish_upcycling
from raymega.checkpoint.tools.inspection import open_root
from raymega.config.schema import CheckpointSection
from raymega.parallel.core.sharded_parameter import initial_values
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.adapters import is_adapter
from raymega.plan.init_from_rules import LAST_STEP, is_reinitialised, matches
from raymega.plan.upcycling import Upcycling
from raymega.storage.store import Store
from raymega.train.build import TrainingComponents

log = logging.getLogger(__name__)


def init_from(
    parts: TrainingComponents,
    section: CheckpointSection,
    *,
    is_resumed: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Load ``checkpoint.init_from`` and ``init_adapter``, rounded where the masters are narrower.

    A run that ``is_resumed`` takes the base of its adapters alone; its own checkpoint has the rest. A base that is held as codes is encoded again; all ranks call it together.
    """
    if section.init_from != "none":
        with foreign_read(BASE, section.init_from):
            _load_base(parts, section, is_resumed=is_resumed, progress=progress)
    # after the base, of which their run may have trained some weights too
    if section.init_adapter != "none":
        with foreign_read(ADAPTER, section.init_adapter):
            _load_adapters(parts, section.init_adapter, progress)


def _load_adapters(parts: TrainingComponents, uri: str, progress: Callable[[], None]) -> None:
    """Load the adapters, and what their run has trained or moved beside them."""
    store, root = open_root(uri)
    blocks = [
        b
        for b in parts.optimizer.blocks()
        if b.kind == WEIGHTS and (is_adapter(b.tensor.name) or b.name in root.shapes)
        if not matches(b.tensor.name, LAST_STEP)
    ]
    manifest = read_blocks(store, root.key, boxes_by_name(blocks))
    load(store, manifest, blocks, is_narrowing_allowed=True, progress=progress)
    parts.optimizer.sync_weights(is_start=True)


def _load_base(
    parts: TrainingComponents,
    section: CheckpointSection,
    *,
    is_resumed: bool,
    progress: Callable[[], None],
) -> None:
    weights = [
        block
        for block in every_block(parts)
        if block.kind == WEIGHTS and not is_adapter(block.tensor.name)
    ]
    source = _open(parts, section, {block.tensor.name for block in weights} | _coded_names(parts))
    taken = source.load(weights, progress)
    # an adapter's magnitudes begin as the norms of what was read
    if not (is_resumed or section.init_adapter != "none"):
        begin_magnitudes(
            parts.optimizer.blocks(), taken, lambda rows: source.load([rows], progress)
        )
    parts.optimizer.sync_weights(is_start=True)
    _encode(parts, source, progress)
    log.info("started from the weights of step %d in %s", source.manifest.step, section.init_from)


def load_codes(parts: TrainingComponents, section: CheckpointSection) -> None:
    """Load from ``checkpoint.init_from`` the weights that are held as codes, and no others; all ranks call it together."""
    if parts.weights.coded and section.init_from != "none":
        with foreign_read(BASE, section.init_from):
            _encode(parts, _open(parts, section, _coded_names(parts)), lambda: None)


def every_block(parts: TrainingComponents) -> Iterator[TensorBlock]:
    """Yield the blocks of a checkpoint, and with adapters also those of the base, which it lacks.

    Weights that are held as codes have none.
    """
    yield from parts.optimizer.blocks()
    if parts.plan.job.model.lora.r:
        for weights in parts.frozen:
            yield from weights.blocks()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Checkpoint that weights are read from.

    Attributes:
        store: Store of the checkpoint.
        manifest: Manifest with the boxes of these weights under the run's names.
        section: Rules of the start.
        upcycling: Experts that start as dense layers.
        seed: Seed of initial values.
    """

    store: Store
    manifest: Manifest
    section: CheckpointSection
    upcycling: Upcycling
    seed: int

    def load(
        self, weights: Sequence[TensorBlock], progress: Callable[[], None]
    ) -> list[TensorBlock]:
        """Fill ``weights``, except a router made by upcycling or a reinitialised tensor, which keeps its values.

        Returns:
            The blocks that the checkpoint gave.
        """
        taken = [block for block in weights if self.is_taken(block.tensor.name)]
        load(self.store, self.manifest, taken, is_narrowing_allowed=True, progress=progress)
        finish_upcycling(self.upcycling, weights, self.seed)
        return taken

    def is_taken(self, name: str) -> bool:
        """Return whether a tensor comes from the checkpoint."""
        return not is_reinitialised(self.section, name) and name not in self.upcycling.routers


def _open(parts: TrainingComponents, section: CheckpointSection, names: Collection[str]) -> _Source:
    """Open ``checkpoint.init_from`` for the weights ``names``; of a large world's index only their boxes are read."""
    store, manifest = open_root(section.init_from)
    model = parts.plan.job.model
    upcycling = upcycling_of(manifest, section, model)
    seed = parts.plan.job.run.seed
    whole = _Source(store=store, manifest=manifest, section=section, upcycling=upcycling, seed=seed)
    taken = {name for name in names if whole.is_taken(name)}
    held = read_blocks(store, manifest.key, source_blocks(manifest, section, model, taken))
    return _Source(
        store=store, manifest=starting_manifest(held, section, model), section=section,
        upcycling=upcycling, seed=seed,
    )  # fmt: skip


def _coded_names(parts: TrainingComponents) -> set[str]:
    """Return the tensors that are held as codes."""
    spans = [span for coded in parts.weights.coded.values() for span in coded.bucket.spans]
    return {piece.tensor.name for span in spans for piece in span.param.spec.pieces}


def _encode(parts: TrainingComponents, source: _Source, progress: Callable[[], None]) -> None:
    """Read and encode the weights that are held as codes, bucket by bucket: no two are whole at a time."""
    for coded in parts.weights.coded.values():
        with parts.weights.recoding(coded.bucket) as frozen:
            blocks = list(frozen.blocks())
            for block in blocks:
                # what the checkpoint does not give keeps its initial values
                if not source.is_taken(block.tensor.name):
                    device = block.values.device
                    drawn = initial_values(block.tensor, block.box, seed=source.seed, device=device)
                    block.values.copy_(drawn)
            source.load(blocks, progress)
