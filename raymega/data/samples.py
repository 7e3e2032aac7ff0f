"""Finds the row of each global sample of a run, and opens the datasets that the rows are of.

`raymega.data.blends.mixture` says which dataset a sample is of, and `raymega.data.order` which of its rows. Both
are arithmetic: nothing here has a state.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymega.config.data import DataSource, is_synthetic
from raymega.config.schema import Job
from raymega.data.blends.mixture import Mixture, mixture_of
from raymega.data.open_split import open_split, shape_of
from raymega.data.order import sample_window
from raymega.data.packing import PackedSource, PlacedPiece
from raymega.data.rows import Row, Source
from raymega.storage.registry import local_path


class Samples:
    """Rows of a run by global sample number.

    Attributes:
        mixture: Dataset of each sample.
        seq_len: Number of tokens of a row (S).
        num_samples: Number of samples after which a dataset begins its second epoch.
        context: Mean over tokens of the length of their document piece; S without packing.
        efficiency: Share of the rows' tokens that are not padding.
    """

    def __init__(self, sources: Sequence[Source], mixture: Mixture, *, seed: int) -> None:
        """Take an opened source for each dataset of the mixture, and the seed of the data order."""
        self._sources, self.mixture, self._seed = sources, mixture, seed
        self.seq_len = sources[0].seq_len
        # means of the first blend, by samples and by tokens
        shared = [pair for pair in zip(mixture.shares(), sources, strict=True) if pair[0]]
        real = [(float(share) * source.efficiency, source) for share, source in shared]
        self.efficiency = sum(tokens for tokens, _ in real)
        self.context = sum(tokens * source.context for tokens, source in real) / self.efficiency
        self.num_samples = min(int(source.num_windows / share) for share, source in shared)

    def row(self, sample: int) -> Row:
        """Return the row of a sample; called a few times per step, may read from disk."""
        source, window = self._find(sample)
        return source.row(window)

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

    def _find(self, sample: int) -> tuple[Source, int]:
        dataset, number = self.mixture.place(sample)
        source = self._sources[dataset]
        return source, sample_window(self._seed, source.num_windows, number)


def open_samples(job: Job) -> Samples:
    """Open the training data of a job.

    Raises:
        ConfigError: There is no dataset at a path.
        DataError: A dataset is damaged or too short.
        StorageError: A dataset's store cannot be reached, or the copy cannot be written.
    """
    return _open(mixture_of(job.data), "train", job)


def open_validation(job: Job) -> dict[str, Samples]:
    """Open the validation sets of a job by name: those of data.validation, or one without a name.

    The one without a name blends the validation splits of the first blend, by its weights.

    Raises:
        ConfigError: There is no dataset at a path.
        DataError: A dataset is damaged or too short, or lacks the split.
        StorageError: A dataset's store cannot be reached, or the copy cannot be written.
    """
    if not job.data.validation:
        return {"": _open(Mixture(job.data.blends[:1]), "valid", job)}
    return {
        named.name: _open(Mixture([(0, [DataSource(path=named.path)])]), named.split, job)
        for named in job.data.validation
    }


def first_rows(job: Job) -> list[list[int]]:
    """Return the document lengths in each row of the first global batch, in sample order.

    It reads no tokens, and copies no dataset from an object store. The list is empty when the job does not pack, or its data are in an object store.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: The dataset is damaged or has no document lengths.
    """
    is_here = all(is_synthetic(path) or local_path(path) for path in job.data.datasets)
    if job.data.packing == "none" or not is_here:
        return []
    samples = open_samples(job)
    # Only the packing is needed, no tokens.
    first = range(job.data.global_batch_size)
    return [[held.length for held in samples.held(sample)] for sample in first]


def _open(mixture: Mixture, split: str, job: Job) -> Samples:
    shape, seed, vocab_size = shape_of(job.data), job.run.seed, job.model.vocab_size
    sources = [
        open_split(path, split, shape, seed=seed, vocab_size=vocab_size)
        for path in mixture.datasets
    ]
    return Samples(sources, mixture, seed=seed)
