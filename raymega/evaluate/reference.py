"""Reference log-probabilities of preference datasets, computed once by a checkpoint on any grid and stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.schema import Job, ModelSection
from raymega.data.heads.form import job_form
from raymega.data.open_split import answer_cut, open_split, shape_of, split_key
from raymega.data.preference.pairs import PairDocuments, PairedSource
from raymega.data.preference.stored_reference import reference_path, write_reference
from raymega.data.streaming.remote_dataset import meta_at
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.evaluate.plan import EvalOptions, plan_of
from raymega.evaluate.requests import Request
from raymega.evaluate.scoring import OnRows, score
from raymega.evaluate.stored import Kept, opened_model
from raymega.plan.run_plan import RunPlan
from raymega.session import session_at

KEPT = Kept(
    field="checkpoint.init_from",
    model="the reference is a model with weights: as a rule, the one that the run begins with",
    stored="the reference is written",
    other="preference.reference=base for adapters",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReference:
    """Reference that was written: the file, its pairs, and the checkpoint that scored them."""

    file: str
    pairs: int
    checkpoint: str


def store_reference(
    job: Job,
    *,
    checkpoint: str = "",
    grid: str = "",
    address: str = "auto",
    on_rows: OnRows | None = None,
) -> list[StoredReference]:
    """Write the reference log-probabilities of every split of a job's datasets.

    Args:
        job: Job that trains on pairs; it says how answers are cut and which labels count.
        checkpoint: URI of the reference; empty for checkpoint.init_from.
        grid: Degrees of the grid that computes them, such as ``tp=2``; empty is one rank.
        address: Ray cluster, as of `raymega train`.
        on_rows: Function that is told how many rows are done, and of how many.

    Raises:
        ConfigError: The job has no preference loss with a reference, no checkpoint, or a dataset elsewhere.
        WorkerError: A worker failed.
    """
    uri = checkpoint or job.checkpoint.init_from
    opened = opened_model(uri, grid, job.dataset_paths, KEPT, _faults(job))
    longest = job.data.seq_len
    plan = plan_of(opened, EvalOptions(grid=grid, seq_len=longest))
    with session_at(address):
        return [
            _store(job, path, split, opened, plan, on_rows or (lambda _done, _total: None))
            for path in job.dataset_paths
            for split in meta_at(path).splits
        ]


def _faults(job: Job) -> Iterator[Fault]:
    section = job.preference
    if not section.needs_reference:
        yield Fault(
            fact=f"preference.loss_type={section.loss_type}",
            rule="it compares with no reference",
            remedy="set preference.loss_type=sigmoid",
        )


def _store(
    job: Job, path: str, split: str, opened: Checkpoint, plan: RunPlan, on_rows: OnRows
) -> StoredReference:
    """Score the answers of one split, and write the sums of their labels that count."""
    shape = replace(shape_of(job.data, job.preference, job_form(job)), pairs="alone")
    source = open_split(path, split, shape, seed=job.run.seed)
    assert isinstance(source, PairedSource), "a job with a preference loss reads pairs"
    # one request an answer; of an answer without a label that counts the sum is 0
    requests, places, masks = [], [], []
    for pair in range(len(source.pairs.lengths)):
        for answer, (tokens, counted) in enumerate(answers_of(source.pairs, pair)):
            if not counted.any():
                continue
            first, last = np.flatnonzero(counted)[[0, -1]]
            requests.append(Request(tokens=tokens[: last + 1], num_targets=int(last - first + 1)))
            places.append((pair, answer))
            masks.append(counted[first : last + 1])
    raise_faults(ConfigError, [*_model_faults(path, requests, plan.job.model)])
    # score all requests on the grid, and sum an answer's labels that count
    sums = np.zeros((len(source.pairs.lengths), 2))
    for place, mask, scores in zip(
        places, masks, score(opened, plan, requests, on_rows=on_rows), strict=True
    ):
        sums[place] = scores.log_probs[mask].sum()
    # write the sums with the cut of answers and the model that they are of
    file, key = reference_path(path, split), f"{opened.store.uri}/{opened.manifest.key}"
    content = split_key(meta_at(path), split)
    write_reference(file, sums, answer_cut(shape) | {"checkpoint": key}, content=content)
    return StoredReference(file=str(file), pairs=len(sums), checkpoint=key)


def _model_faults(path: str, requests: Sequence[Request], model: ModelSection) -> Iterator[Fault]:
    """Yield the faults of a reference that cannot read the answers."""
    longest = max((len(each.tokens) - 1 for each in requests), default=0)
    largest = max((int(each.tokens.max()) for each in requests), default=0)
    for name, value, needed, what in (
        ("max_positions", model.max_positions, longest, f"answers of up to {longest + 1} tokens"),
        ("vocab_size", model.vocab_size, largest + 1, f"tokens up to {largest}"),
    ):
        if value < needed:
            yield Fault(
                fact=f"the reference has model.{name}={value}",
                rule=f"{path} has {what}, so it must be at least {needed}",
                remedy="take the model that the run begins with, or set data.seq_len to what the reference reads",
            )


def answers_of(pairs: PairDocuments, pair: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens, and which count as labels, of the two answers of a pair, without padding."""
    length = int(pairs.lengths[pair])
    tokens, counted = pairs.read(pair, 0, length), pairs.counted(pair, 0, length)
    for at, size in pairs.places(pair):
        yield tokens[at : at + size], counted[at : at + size]
