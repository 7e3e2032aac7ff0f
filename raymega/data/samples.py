"""Finds the row of each global sample of a run, and opens the datasets that the rows are of.

`raymega.data.blends.mixture` says which dataset a sample is of, and `raymega.data.order` which of its rows. Both
are arithmetic: nothing here has a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raymega.config.data import MEGATRON, DataSource, is_computed, is_synthetic
from raymega.config.schema import Job
from raymega.data.blends.mixture import Mixture, mixture_of
from raymega.data.distillation.stored_logits import SPLIT, DrawnRows, TeacherRows, open_logits
from raymega.data.heads.form import job_form
from raymega.data.megatron import is_megatron
from raymega.data.open_split import Shape, open_split, shape_of
from raymega.data.order import RowOrder
from raymega.data.packing import PackedSource, PlacedPiece
from raymega.data.row_rules.masking import Masks, Text
from raymega.data.row_rules.rules import PLAIN_ROWS, RowRules, row_rules
from raymega.data.rows import Image, Row, Source
from raymega.data.streaming.bin_parts import look_at
from raymega.data.streaming.fetcher import NOTHING_KNOWN, Fetcher
from raymega.data.streaming.remote_dataset import description_digest, is_remote
from raymega.data.streaming.stream_rows import StreamSource
from raymega.storage.registry import local_path
from raymega.storage.store import Store

TOLD_PER_BLOCK = 16
"""Times in a block that a dataset is told which shards come next."""


class Samples:
    """Rows of a run by global sample number.

    Attributes:
        mixture: Dataset of each sample.
        seq_len: Number of tokens of a row (S).
        num_samples: Number of samples after which a dataset begins its second epoch.
        context: Mean over tokens of the length of their document piece; S without packing.
        efficiency: Share of the rows' tokens that are not padding.
        taught: Stored logits of a teacher for each dataset; empty without.
    """

    taught: Sequence[TeacherRows] = ()

    def __init__(
        self,
        sources: Sequence[Source],
        mixture: Mixture,
        *,
        seed: int,
        block_bytes: int,
        fetcher: Fetcher | None = None,
        rules: RowRules = PLAIN_ROWS,
    ) -> None:
        """Take an opened source for each dataset of the mixture, and what the order of rows depends on.

        Args:
            sources: Rows of each dataset.
            mixture: Dataset of each sample.
            seed: Seed of the run's random numbers.
            block_bytes: Most bytes of a block of shards, as ``data.shuffle_block_bytes``.
            fetcher: Threads that bring shards from object stores; None where all are here.
            rules: Rules by which rows are made of what is read.
        """
        self._rules = rules
        self._told, self.fetcher = dict[int, tuple[int, int, int]](), fetcher
        self._sources, self.mixture = sources, mixture
        self._orders = [
            RowOrder(source.shards, seed=seed, block_bytes=block_bytes) for source in sources
        ]
        self.seq_len = sum(rules.spans.lengths) if rules.spans else sources[0].seq_len
        # means of the first blend, by samples and by tokens
        shared = [pair for pair in zip(mixture.shares(), sources, strict=True) if pair[0]]
        real = [(float(share) * source.efficiency, source) for share, source in shared]
        self.efficiency = sum(tokens for tokens, _ in real)
        self.context = sum(tokens * source.context for tokens, source in real) / self.efficiency
        if rules.spans:  # a row is not the text that it is made of
            self.efficiency *= rules.spans.filled(self.context)
            self.context = float(self.seq_len)
        self.num_samples = min(int(source.num_windows / share) for share, source in shared)

    def row(self, sample: int) -> Row:
        """Return the row of a sample; called a few times per step, may read from disk."""
        if self._rules.spans:
            texts = [text for text, _ in self._texts(sample)]
            row = self._rules.spans.row(texts, sample)
        elif self._rules.masks:
            row = self._masked_row(self._rules.masks, sample)
        else:
            row = self._plain_row(sample)
        if self._rules.images:
            row = self._rules.images.row(row, sample)
        for transform in self._rules.transforms:
            row = transform(row, sample)
        return row

    def images(self, sample: int) -> tuple[Image, ...]:
        """Return the images of a sample's row; of a prepared dataset it reads no tokens for them."""
        (source, window), rule = self._find(sample), self._rules.images
        # images are drawn into built-in tokens, and a transform may change a row's
        is_as_stored = rule is not None and not rule.is_drawn and not self._rules.transforms
        if rule and is_as_stored and isinstance(source, PackedSource | StreamSource):
            return rule.changed(source.images_in(window), sample)
        return self.row(sample).images

    def held(self, sample: int) -> list[PlacedPiece]:
        """Return the pieces of documents of a packed sample's row; reads no tokens."""
        source, window = self._find(sample)
        assert isinstance(source, PackedSource), "only packed rows have pieces"
        return source.held(window)

    def epochs(self, num_samples: int) -> dict[str, tuple[int, float]]:
        """Return the samples and epochs of each dataset among the first ``num_samples``, by name."""
        counts = self.mixture.counts(num_samples)
        return {
            name: (count, count / source.num_windows)
            for name, count, source in zip(self.mixture.names, counts, self._sources, strict=True)
        }

    def _plain_row(self, sample: int) -> Row:
        source, window = self._find(sample)
        row = source.row(window)
        if not self.taught:
            return row
        dataset, _ = self.mixture.place(sample)
        return replace(row, taught=self.taught[dataset].row(window))

    def _masked_row(self, masks: Masks, sample: int) -> Row:
        other = None
        if masks.sentence_loss == "next_sentence":
            other = max((text for text, _ in self._texts(masks.other(sample))), key=len)
        return masks.row(self._texts(sample), other, sample, seq_len=self.seq_len)

    def _texts(self, sample: int) -> list[Text]:
        """Return the documents of a sample's row: tokens, and the length with padding."""
        source, window = self._find(sample)
        if isinstance(source, PackedSource):
            held = source.held(window)
            return [(source.read(each)[0][: each.length], each.padded) for each in held]
        return [(source.row(window).tokens, source.seq_len)]

    def _find(self, sample: int) -> tuple[Source, int]:
        dataset, number = self.mixture.place(sample)
        if self.fetcher:
            self._tell(dataset, number)
        return self._sources[dataset], self._orders[dataset].row(number)

    def _tell(self, dataset: int, number: int) -> None:
        """Tell a dataset which shards are read from its sample ``number`` on: this block's, then the next one's.

        Of the next block twice the share is asked for that is read of this one, so that it is here in time
        and little is fetched that a run which ends does not read.
        """
        order = self._orders[dataset]
        epoch, block, share = order.place(number)
        place = epoch, block, int(share * TOLD_PER_BLOCK)
        if self._told.get(dataset) == place:
            return
        self._told[dataset] = place
        ahead = order.shards_after(number, 2 * (place[2] + 1) / TOLD_PER_BLOCK)
        self._sources[dataset].need([*dict.fromkeys([*order.shards_from(number), *ahead])])


def known_datasets(job: Job) -> dict[str, str]:
    """Return what stores say of a job's datasets in them, by path, with which ranks open them without a store.

    Raises:
        ConfigError: There is no dataset at a path.
        StorageError: A dataset's store cannot be reached.
    """
    return {
        path: look_at(path.removeprefix(MEGATRON)).known
        if is_megatron(path)
        else description_digest(path)
        for path in job.dataset_paths
        if is_remote(path)
    }


def open_samples(
    job: Job, known: Mapping[str, str] = NOTHING_KNOWN, run: Store | None = None
) -> Samples:
    """Open the training data of a job.

    Args:
        job: Job whose data are opened.
        known: Result of :func:`known_datasets`.
        run: Store of the run for its ranks, which leave there what other nodes would count; None to leave nothing.

    Raises:
        ConfigError: There is no dataset at a path.
        DataError: A dataset is damaged or too short.
        StorageError: A dataset's store cannot be reached.
    """
    return _open(mixture_of(job.data), "train", job, known, run=run)


def open_validation(job: Job, known: Mapping[str, str] = NOTHING_KNOWN) -> dict[str, Samples]:
    """Open the validation sets of a job by name: those of data.validation, or one without a name.

    The one without a name blends the validation splits of the first blend, by its weights.

    Raises:
        ConfigError: There is no dataset at a path.
        DataError: A dataset is damaged or too short, or lacks the split.
        StorageError: A dataset's store cannot be reached.
    """
    if not job.data.validation:
        return {"": _open(Mixture(job.data.blends[:1]), "valid", job, known)}
    return {
        named.name: _open(
            Mixture([(0, [DataSource(path=named.path)])]), named.split, job, known, role="valid"
        )
        for named in job.data.validation
    }


def first_rows(job: Job) -> list[list[int]]:
    """Return the document lengths in each row of the first global batch, in sample order.

    It reads no tokens, and copies no dataset from an object store. The list is empty when the job does not pack, or its data are in an object store.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: The dataset is damaged or has no document lengths.
    """
    is_here = all(is_computed(path) or local_path(path) for path in job.data.datasets)
    if job.data.packing == "none" or not is_here:
        return []
    samples = open_samples(job)
    # Only the packing is needed, no tokens.
    first = range(job.data.global_batch_size)
    return [[held.length for held in samples.held(sample)] for sample in first]


def _shape(job: Job) -> Shape:
    return shape_of(job.data, job.preference, job_form(job))


def _open(  # what ranks and plans open differs in the last two
    mixture: Mixture,
    split: str,
    job: Job,
    known: Mapping[str, str],
    *,
    role: str = "",
    run: Store | None = None,
) -> Samples:
    """Open a split of each dataset; ``role`` is the split whose rules its rows have, empty for its own."""
    shape, seed, vocab_size = _shape(job), job.run.seed, job.model.vocab_size
    # a validation set may be a train split, which is read as held-out text all the same
    role = role or split
    fetcher = None
    if any(map(is_remote, mixture.datasets)):
        timeout_s = job.elastic.collective_timeout_s
        fetcher = Fetcher(limit_bytes=job.data.cache_bytes, timeout_s=timeout_s, known=known)
    sources = [
        open_split(
            path,
            split,
            shape,
            seed=seed,
            vocab_size=vocab_size,
            fetcher=fetcher,
            plugins=job.plugins,
            run=run,
        )
        for path in mixture.datasets
    ]
    samples = Samples(
        sources,
        mixture,
        seed=seed,
        block_bytes=job.data.shuffle_block_bytes,
        fetcher=fetcher,
        rules=row_rules(job, role),
    )
    samples.taught = _taught(mixture.datasets, role, job)
    return samples


def _taught(paths: Sequence[str], split: str, job: Job) -> list[TeacherRows]:
    """Return the stored logits of a teacher of each dataset; none where the job reads none."""
    section = job.distillation
    if not section.is_on or section.is_live or split != SPLIT:
        return []
    return [
        DrawnRows(
            name=f"{path}/{job.run.seed}",
            seq_len=job.data.seq_len,
            k=section.top_k,
            vocab_size=job.model.vocab_size,
        )
        if is_synthetic(path)
        else open_logits(path, job.data, top_k=section.top_k, vocab_size=job.model.vocab_size)
        for path in paths
    ]
