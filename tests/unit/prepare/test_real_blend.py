"""A blend of three real corpora: its shares at every prefix, and which rows are read whoever reads them.

German and French paragraphs of the Debian reference, and Python's code, are prepared as bytes and blended 0.6/0.3/0.1.
"""

import json
from contextlib import nullcontext
from random import Random

import numpy as np
import pytest

from raymega.data.samples import open_samples
from raymega.plan.batch import make_batch
from raymega.prepare import pipeline
from tests.support import published
from tests.support.jobs import make_test_plan
from tests.unit.prepare.corpora import prepared

pytestmark = pytest.mark.wide

WEIGHTS = (0.6, 0.3, 0.1)
NUM_SAMPLES, SEQ_LEN, BORDER = 100_000, 8, 400
NUM_DOCUMENTS = 1_000
READ = 600
"""Samples whose rows are read."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Folders of the three datasets."""
    folder, texts = tmp_path_factory.mktemp("corpora"), published.documents(NUM_DOCUMENTS)
    share = NUM_DOCUMENTS // 5
    parts = {"de": texts[:share], "fr": texts[share : 2 * share], "code": texts[4 * share :]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "on_cluster", lambda items, run: map(run, items))
        patched.setattr(pipeline, "session_at", lambda _: nullcontext())
        for name, part in parts.items():
            lines = (json.dumps({"text": text}) + "\n" for text in part)
            (folder / f"{name}.jsonl").write_text("".join(lines))
            prepared(folder / f"{name}.jsonl", folder / name)
    return [folder / name for name in parts]


def _samples(folders, *, stages="[]"):
    entries = ", ".join(
        f"{{path: {path}, weight: {weight}}}" for path, weight in zip(folders, WEIGHTS, strict=True)
    )
    settings = (
        "data.path=none", f"data.sources=[{entries}]", f"data.stages={stages}", f"data.seq_len={SEQ_LEN}",
        "model.vocab_size=257",
    )  # fmt: skip
    return open_samples(make_test_plan(*settings).job)


def _rows(samples, numbers):
    return [samples.row(number).tokens.tobytes() for number in numbers]


def test_shares_are_kept_at_every_prefix_as_megatron_keeps_them(corpora):
    place = _samples(corpora).mixture.place
    ours = np.array([place(sample)[0] for sample in range(NUM_SAMPLES)])
    read = np.array([np.cumsum(ours == source) for source in range(3)])
    n = np.arange(1, NUM_SAMPLES + 1)
    assert np.abs(read - np.outer(WEIGHTS, n)).max() <= 1
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    theirs, ranks = np.zeros(NUM_SAMPLES, np.int16), np.zeros(NUM_SAMPLES, np.int64)
    helpers.build_blending_indices(theirs, ranks, np.array(WEIGHTS), 3, NUM_SAMPLES, False)
    them = np.array([np.cumsum(theirs == source) for source in range(3)])
    assert np.abs(read - them).max() <= 1


def test_rows_are_read_once_in_an_epoch(corpora):
    samples = _samples(corpora)
    found = [samples._find(sample) for sample in range(NUM_SAMPLES // 4)]
    for source in samples._sources:
        rows = [row for each, row in found if each is source]
        for first in range(0, len(rows), source.num_windows):
            epoch = rows[first : first + source.num_windows]
            assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("seed", range(3))
def test_killed_run_on_other_grids_with_a_new_stage_reads_the_same_rows(corpora, seed):
    """Each global sample once; a stage that is added later changes nothing before it."""
    added = f"[{{from_tokens: {BORDER * SEQ_LEN}, sources: [{{path: {corpora[2]}}}]}}]"
    whole = _rows(_samples(corpora, stages=added), range(READ))
    assert whole[:BORDER] == _rows(_samples(corpora), range(BORDER))
    random, position, found = Random(seed), 0, {}
    while position < READ:
        # a new process, with the stage from the middle of the first blend on
        samples = _samples(corpora, stages=added if position > BORDER // 2 else "[]")
        last = BORDER if position <= BORDER // 2 else READ
        dp, micro = random.randint(1, 5), random.randint(1, 3)
        batch = make_batch(global_batch_size=50, micro_batch_size=micro, dp=dp)
        for _ in range(random.randint(4, 12)):
            if position >= last:
                break
            mine = [
                [number for number in batch.samples(index, rank, position) if number >= 0]
                for index in range(batch.num_micro_batches)
                for rank in range(dp)
            ]
            for number in (number for part in mine for number in part):
                assert number not in found
                found[number] = _rows(samples, [number])[0]
            position += 50
    assert [found[number] for number in range(READ)] == whole
