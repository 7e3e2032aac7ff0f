"""Opens a split by its path and cuts it into windows, or packs its documents into rows.

Nothing is read of a split's tokens, and of its documents only the lengths, which a node's processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from raymega.config.data import MEGATRON, DataSection, source_name
from raymega.config.preference import PreferenceSection
from raymega.config.schema import PluginsSection
from raymega.data.arrow import TokenStream
from raymega.data.format import (
    CONTEXT,
    EARLIER_ANSWER,
    LAST_ANSWER,
    META_FILE,
    DatasetMeta,
)
from raymega.data.heads.labelled import LabelledSource
from raymega.data.images.stored import HeldImages, StoredImages
from raymega.data.megatron import MegatronStream, is_megatron, megatron_key
from raymega.data.packing import (
    Documents,
    Keep,
    PackedSource,
    WindowRows,
    from_tables,
    no_keep,
    to_tables,
)
from raymega.data.preference.pairs import PairDocuments, PairedSource
from raymega.data.preference.stored_reference import read_reference
from raymega.data.row_rules.plugin_rows import open_named
from raymega.data.rows import (
    TEXTS,
    UNDESIRABLE,
    DocumentSource,
    Pairs,
    RowForm,
    Source,
    SourceSetup,
)
from raymega.data.rows import LossOn as LossOn
from raymega.data.rows import Shape as Shape
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.node_cache import SHARED_DOCUMENTS, Tables, run_tables, shared_tables
from raymega.data.streaming.remote_dataset import is_remote, open_files
from raymega.data.streaming.stream_rows import Labels, Stream, StreamDocuments, StreamSource
from raymega.data.synthetic import SyntheticDocuments, SyntheticSource, drawn_reference, seed_of
from raymega.errors import DataError, Fault
from raymega.storage.store import Store

LEAST_TARGET: dict[LossOn, int] = {
    "auto": EARLIER_ANSWER, "assistant": EARLIER_ANSWER, "completion": LAST_ANSWER, "all": CONTEXT,
}  # fmt: skip


def pairs_of(section: PreferenceSection) -> Pairs:
    """Return the use of a preference dataset by a job."""
    if not section.is_on:
        return "none"
    return section.reference if section.needs_reference else "alone"


def answer_cut(shape: Shape) -> dict[str, object]:
    """Return what the log-probability of an answer depends on besides the model, by the job's fields."""
    return {
        "data.seq_len": shape.seq_len,
        "data.document_multiple": shape.multiple,
        "data.loss_on": shape.counted_on,
    }


def shape_of(
    section: DataSection, preference: PreferenceSection | None = None, form: RowForm = TEXTS
) -> Shape:
    """Return the shape that a job's data section sets, for texts, for pairs, or for labelled documents."""
    return Shape(
        seq_len=section.text_len,
        packing=section.packing,
        window=section.packing_window,
        multiple=section.document_multiple,
        loss_on=section.loss_on,
        pairs="none" if preference is None else pairs_of(preference),
        form=form,
    )


def open_split(  # noqa: PLR0913  # what the rows of any dataset depend on
    path: str,
    split: str,
    shape: Shape,
    *,
    seed: int,
    vocab_size: int = 1 << 31,
    fetcher: Fetcher | None = None,
    plugins: PluginsSection | None = None,
    run: Store | None = None,
) -> Source:
    """Open one split; no shard is looked at before its first row is read.

    Shards of a dataset in an object store are brought to this node when they are needed; see
    `raymega.data.streaming.shard_cache`.

    Args:
        path: Path of a dataset, as ``data.path``.
        split: Name of the split, ``train`` or ``valid``.
        shape: Rules by which the split is cut into samples.
        seed: Seed of the run's random numbers; only synthetic tokens depend on it.
        vocab_size: Tokens of the model's vocabulary, for Megatron's files, which do not tell theirs.
        fetcher: Threads that bring shards from object stores; None for threads of their own.
        plugins: Options of a data source of a plug-in.
        run: Store of the run, in which its nodes share the numbers of packed rows; None to count them on each node.

    Raises:
        ConfigError: There is no dataset at the path, or a plug-in failed.
        DataError: The dataset is damaged, lacks the split, is shorter than one window, or has no
            document lengths for packing.
        StorageError: The dataset's store cannot be reached.
    """
    # a data source by name: built-in tokens, Megatron's files, or a plug-in's
    if name := source_name(path):
        setup = SourceSetup(path=path, split=split, shape=shape, seed=seed, vocab_size=vocab_size)
        if is_megatron(path):
            return open_megatron(setup, fetcher, run)
        opened = open_named(name, setup, plugins)
        return packed(opened, shape) if isinstance(opened, DocumentSource) else opened
    # A prepared dataset: check it as far as possible without reading tokens.
    is_packed = shape.packing != "none"
    meta, files = open_files(path, fetcher)
    if split not in meta.splits:
        raise DataError(missing_split(path, split))
    if is_packed and not meta.has_documents:
        raise DataError(no_documents(path))
    # open the rows: labels that count, and the key by which a node shares tables
    stream = TokenStream(files, meta.splits[split])
    is_labelled = shape.grouped.has_labels and meta.has_targets
    labels = stream.read_targets if is_labelled else labels_of(stream, meta, shape.counted_on)
    key = split_key(meta, split) if is_packed else ""
    setup = SourceSetup(path=path, split=split, shape=shape, seed=seed, vocab_size=meta.vocab_size)
    source = _rows_of(stream, setup, labels=labels, key=key, run=run)
    if meta.images is not None:
        _with_images(source, StoredImages(stream.read_images, meta.images))
    return source


def _with_images(source: Source, images: StoredImages) -> None:
    """Let the rows of a dataset have its images."""
    if isinstance(source, StreamSource):
        source.images = images
        return
    assert isinstance(source, PackedSource), "rows are cut or packed"
    documents = source.documents
    assert isinstance(documents, StreamDocuments), "a dataset has such documents"

    def held(document: int, start: int, stop: int) -> HeldImages:
        first = documents.start(document)
        return images.held(first + start, first + stop)

    source.images_of = held


def open_synthetic(setup: SourceSetup) -> Source:
    """Open built-in tokens."""
    shape, own = setup.shape, seed_of(setup.path, setup.seed)
    if shape.packing != "none":
        documents = SyntheticDocuments(
            split=setup.split,
            seq_len=shape.seq_len,
            seed=own,
            loss_on=shape.counted_on,
            form=shape.grouped,
        )
        source = packed(documents, shape)
        if shape.pairs == "stored":
            assert isinstance(source, PairedSource), "pairs have such a source"
            name = f"{own}/{setup.split}"
            source.reference = drawn_reference(name, len(source.pairs.lengths))
        return source
    return SyntheticSource(
        split=setup.split, seq_len=shape.seq_len, seed=own, loss_on=shape.loss_on
    )


def open_megatron(
    setup: SourceSetup, fetcher: Fetcher | None = None, run: Store | None = None
) -> Source:
    """Open Megatron's files; ``fetcher`` brings those of an object store, ``run`` is as in :func:`open_split`."""
    if setup.split != "train":
        raise DataError(missing_split(setup.path, setup.split))
    stream = MegatronStream(setup.path.removeprefix(MEGATRON), fetcher)
    known = fetcher.known.get(setup.path, "") if fetcher else ""
    key = megatron_key(setup.path, known) if setup.shape.packing != "none" else ""
    return _rows_of(stream, setup, labels=None, key=key, run=run)


def _rows_of(
    stream: Stream, setup: SourceSetup, *, labels: Labels | None, key: str, run: Store | None
) -> Source:
    """Return the rows of a stream of tokens, packed or cut."""
    shape, vocab_size = setup.shape, setup.vocab_size
    if shape.packing != "none":
        # packed rows, of pairs with their stored reference
        source = pack_stream(stream, setup, labels=labels, key=key, run=run)
        if shape.pairs == "stored":
            assert isinstance(source, PairedSource), "pairs have such a source"
            source.reference = read_reference(
                setup.path, setup.split, answer_cut(shape), content=key
            )
        return source
    # windows: one takes a token more than a row, from a single shard
    sizes = [shard.num_tokens for shard in stream.shards]
    if max(sizes, default=0) <= shape.seq_len:
        raise DataError(short_split(setup.path, setup.split, sizes or [0], shape.seq_len))
    return StreamSource(stream, seq_len=shape.seq_len, vocab_size=vocab_size, labels=labels)


def labels_of(stream: TokenStream, meta: DatasetMeta, loss_on: LossOn) -> Labels | None:
    """Return the function that says which tokens of a dataset's split count as labels; None if all do.

    All but the tokens of a conversation's answers are counted out unless ``loss_on`` is ``all``.
    """
    if not meta.has_targets:
        return None
    least = LEAST_TARGET[loss_on]

    def counts(start: int, stop: int) -> npt.NDArray[np.bool_]:
        found = stream.read_targets(start, stop)
        # whether an answer is desirable is a bit above
        return (found % UNDESIRABLE if meta.row_format == "kto" else found) >= least

    return counts


def split_key(meta: DatasetMeta, split: str) -> str:
    """Return a digest of a split's content."""
    shards = [(shard.num_tokens, shard.crc32) for shard in meta.splits[split].shards]
    return blake2b(repr(shards).encode(), digest_size=8).hexdigest()


def pack_stream(
    stream: Stream,
    setup: SourceSetup,
    *,
    labels: Labels | None,
    key: str,
    run: Store | None = None,
) -> PackedSource:
    """Pack the documents of a stream; ``key`` is the digest under which a node's processes share their lengths.

    Where the shards are in an object store, the lengths are shared however few they are. Without a
    file of lengths all shards are fetched for them. The nodes of a ``run`` share the numbers of rows.
    """
    # lengths of documents, read once a node where that takes long
    num_documents = sum(shard.num_documents for shard in stream.shards)
    is_shared = is_remote(setup.path) or num_documents >= SHARED_DOCUMENTS
    share = shared_tables if is_shared else lambda *args: args[-1]()
    lengths = share(key, "lengths", lambda: {"lengths": stream.document_lengths()})
    documents = StreamDocuments(
        stream, lengths["lengths"], vocab_size=setup.vocab_size, labels=labels
    )
    # rows, under a name with everything that packing depends on
    shape, form = setup.shape, setup.shape.grouped
    kind = f"{form.kind}-{form.size}-{int(form.is_causal)}" if form.size else "rows"
    name = f"{kind}-{shape.seq_len}-{shape.window}-{shape.multiple}-{int(documents.is_truncated)}"

    def keep(make: Callable[[], WindowRows]) -> WindowRows:
        def counted() -> Tables:
            return to_tables(make())

        # a request takes longer than to count few
        if run is None or num_documents < SHARED_DOCUMENTS:
            return from_tables(share(key, name, counted))
        copy = f"packing/{key}-{name}.npz"
        return from_tables(share(key, name, lambda: run_tables(run, copy, counted)))

    return packed(documents, shape, keep)


def packed(documents: Documents, shape: Shape, keep: Keep = no_keep) -> PackedSource:
    """Pack ``documents``, or pairs of them, into rows of ``shape``."""
    form = shape.grouped
    if form.size:
        pairs = PairDocuments(
            documents, seq_len=shape.seq_len, multiple=shape.multiple, size=form.size, is_causal=form.is_causal,
            least=LEAST_TARGET[shape.counted_on] if form.kind == "answers" else -1,
        )  # fmt: skip
        if form.has_labels:
            return LabelledSource(pairs, form, window=shape.window, keep=keep)
        return PairedSource(pairs, window=shape.window, keep=keep)
    return PackedSource(
        documents, seq_len=shape.seq_len, window=shape.window, multiple=shape.multiple, keep=keep
    )


def no_documents(path: str, *, field: str = "data.path") -> Fault:
    """Return the fault of a dataset whose shards do not hold the lengths of their documents."""
    return Fault(
        fact=f"{field}={path!r} was prepared without the boundaries of documents",
        rule=f"data.packing=best_fit needs them: {META_FILE} of version 2",
        remedy="run `raymega data prepare` again into a new folder, or set data.packing=none",
    )


def missing_split(path: str, split: str) -> Fault:
    """Return the fault of a dataset that has no such split."""
    if is_megatron(path):
        return Fault(
            fact=f"{path} has no {split} split",
            rule="Megatron's files are one split, train, and the job evaluates on held-out text",
            remedy="set data.validation=[{name: held-out, path: megatron:OTHER, split: train}], or "
            "run.eval_samples=0",
        )
    return Fault(
        fact=f"{path} has no {split} split",
        rule="it was prepared with --valid-fraction 0",
        remedy="set run.eval_samples=0 to train without evaluation, or prepare it again with "
        "--valid-fraction 0.02",
    )


def short_split(path: str, split: str, shards: Sequence[int], seq_len: int) -> Fault:
    """Return the fault of a split whose ``shards``, given by their tokens, are all shorter than one window."""
    return Fault(
        fact=f"the {split} split of {path} has {sum(shards)} tokens",
        rule=f"a window of data.seq_len={seq_len} takes {seq_len + 1} of one shard",
        remedy="prepare more text, or set a smaller data.seq_len",
    )
