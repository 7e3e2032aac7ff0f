"""Blends and stages of a run: each sample of a dataset once in an epoch, whatever stage reads it."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from raymega.config.data import DataSection, DataSource, DataStage
from raymega.config.schema import PluginsSection
from raymega.data import samples
from raymega.data.blends import epochs
from raymega.data.blends.epochs import num_rows, streamed_reads
from raymega.data.blends.mixture import Mixture, mixture_of
from raymega.data.row_rules.rules import PLAIN_ROWS
from raymega.data.rows import one_shard, whole_row
from raymega.data.samples import Samples, open_samples, open_validation
from raymega.plan.batch import make_batch, samples_after, steps_for
from tests.support.jobs import make_test_plan
from tests.unit.data.datasets import write_dataset

SEQ_LEN = 4


class Numbered:
    """Rows that hold the number of their dataset and their own."""

    seq_len, context, efficiency = SEQ_LEN, float(SEQ_LEN), 1.0

    def __init__(self, dataset, num_windows):
        self.num_windows, self._dataset = num_windows, dataset
        self.shards = one_shard(num_windows)

    def need(self, shards):
        pass

    def row(self, index):
        return whole_row(np.array([self._dataset, index, *range(SEQ_LEN - 1)]))


def _drawn(seed):
    """Stages of a few datasets with drawn weights, and sources of drawn sizes."""
    random = Random(seed)
    paths = [f"d{number}" for number in range(random.randint(1, 5))]
    firsts = sorted({0, *(random.randint(1, 300) for _ in range(random.randint(0, 3)))})
    stages = [
        (
            first,
            [
                DataSource(path=path, weight=round(random.uniform(0.05, 1), 2))
                for path in random.sample(paths, random.randint(1, len(paths)))
            ],
        )
        for first in firsts
    ]
    mixture = Mixture(stages)
    sizes = {path: random.randint(3, 90) for path in paths}
    sources = [Numbered(number, sizes[path]) for number, path in enumerate(mixture.datasets)]
    return (
        stages,
        Samples(sources, mixture, seed=seed, block_bytes=1),
        [one.num_windows for one in sources],
    )


def _job(*overrides):
    """The job of jobs/verify.yaml with overrides."""
    return make_test_plan("data.seq_len=8", *overrides).job


def _read(samples, sample):
    """Dataset and row of a sample."""
    return tuple(samples.row(sample).tokens[:2].tolist())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sample(15)
def test_each_row_is_read_once_in_an_epoch_across_stages(seed):
    _, samples, sizes = _drawn(seed)
    read = [_read(samples, sample) for sample in range(600)]
    by_dataset = [
        [row for dataset, row in read if dataset == number] for number in range(len(sizes))
    ]
    for rows, size in zip(by_dataset, sizes, strict=True):
        for first in range(0, len(rows), size):
            epoch = rows[first : first + size]
            assert len(set(epoch)) == len(epoch)
    # counts are those of what was read, at every prefix of interest
    for end in (0, 1, 299, 600):
        counts = Counter(dataset for dataset, _ in read[:end])
        assert samples.mixture.counts(end) == tuple(counts[n] for n in range(len(sizes)))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sample(15)
def test_run_that_is_killed_and_goes_on_elsewhere_reads_the_same(seed):
    """A new process on another grid computes samples from their numbers alone."""
    stages, samples, _ = _drawn(seed)
    random, whole = Random(seed), [_read(samples, sample) for sample in range(400)]
    position, found = 0, {}
    while position < 400:
        _, again, _ = _drawn(seed)
        dp, micro = random.randint(1, 5), random.randint(1, 3)
        batch = make_batch(global_batch_size=16, micro_batch_size=micro, dp=dp)
        for _ in range(random.randint(1, 8)):
            for index in range(batch.num_micro_batches):
                for rank in range(dp):
                    for sample in batch.samples(index, rank, position):
                        assert sample not in found
                        found |= {sample: _read(again, sample)} if sample >= 0 else {}
            position += 16
    assert [found[sample] for sample in range(400)] == whole
    assert len(stages) >= 1


@pytest.mark.parametrize("seed", range(10))
def test_later_stage_changes_nothing_before_it(seed):
    stages, samples, _ = _drawn(seed)
    later = [*stages, (350, [DataSource(path="new"), *stages[0][1]])]
    changed = Mixture(later)
    assert [samples.mixture.place(n) for n in range(350)] == [changed.place(n) for n in range(350)]
    # the dataset that is there in both goes on where it was
    path = stages[0][1][0].path
    number = changed.datasets.index(path)
    ranks = [rank for dataset, rank in map(changed.place, range(700)) if dataset == number]
    assert ranks == list(range(len(ranks)))


def test_names_of_datasets_are_different():
    """Metrics go by them: one would have been that of another dataset."""
    paths = ("/x/web", "/y/web", "/z/web-1")
    assert len({*Mixture([(0, [DataSource(path=path) for path in paths])]).names}) == 3


def test_stage_begins_at_a_whole_sample():
    section = DataSection(
        path="a",
        seq_len=10,
        global_batch_size=4,
        stages=(DataStage(from_tokens=101, sources=(DataSource(path="b"),)),),
    )
    assert mixture_of(section).firsts == [0, 11]
    assert [mixture_of(section).place(sample)[0] for sample in (10, 11)] == [0, 1]


def test_blend_of_one_reads_what_the_dataset_alone_reads(tmp_path):
    write_dataset(tmp_path, train=(250,))
    alone = _job(f"data.path={tmp_path}")
    blend = _job(f"data.sources=[{{path: {tmp_path}, weight: 3}}]", "data.path=none")
    rows = [
        [open_samples(data).row(sample).tokens.tolist() for sample in range(100)]
        for data in (alone, blend)
    ]
    assert rows[0] == rows[1]


def test_named_validation_sets_are_opened_by_name(tmp_path):
    write_dataset(tmp_path, train=(500,), valid=(100,))
    sets = f"[{{name: held, path: {tmp_path}}}, {{name: seen, path: {tmp_path}, split: train}}]"
    data = _job(f"data.validation={sets}")
    found = open_validation(data)
    assert {name: one.num_samples for name, one in found.items()} == {"held": 12, "seen": 62}
    (alone,) = open_validation(_job(f"data.path={tmp_path}")).items()
    assert alone[0] == "" and alone[1].num_samples == 12


def test_train_split_of_a_validation_set_is_held_out_text(tmp_path, monkeypatch):
    """Its images do not change at random, and no teacher's logits need lie beside it."""
    write_dataset(tmp_path, train=(500,), valid=())
    held_out, roles = f"[{{name: held, path: {tmp_path}, split: train}}]", []
    monkeypatch.setattr(samples, "row_rules", lambda _, role: roles.append(role) or PLAIN_ROWS)
    teacher = {"loss_type": "forward_kl", "teacher": "stored", "top_k": 4}
    data = _job(f"data.validation={held_out}").with_values(distillation=teacher)
    assert open_validation(data)["held"].row(0).taught is None and roles == ["valid"]


def test_disk_of_a_plan_is_that_of_every_split_that_is_read(tmp_path, monkeypatch):
    """The training split was left out where a validation set is of the same dataset."""
    meta = write_dataset(tmp_path, train=(400,), valid=(90,))
    train, valid = (meta.splits[name].shards[0].num_bytes for name in ("train", "valid"))
    monkeypatch.setattr(epochs, "meta_at", lambda _: meta)
    far = ("data.path=s3://far/away", "run.eval_samples=2")
    named = "data.validation=[{name: held, path: s3://far/away}]"
    for job in (_job(*far), _job(*far, named)):
        assert streamed_reads(job).cached_bytes == train + valid
    assert streamed_reads(_job(*far, "run.eval_samples=0")).cached_bytes == train


def test_epoch_of_far_conversations_has_no_more_rows_than_documents(tmp_path, monkeypatch):
    """They are cut at the end of a row: their tokens say more rows than there are."""
    meta = write_dataset(tmp_path, train=(400, 300, 8), valid=(), version=3)
    monkeypatch.setattr(epochs, "meta_at", lambda _: meta)
    section = _job("data.packing=best_fit", "data.seq_len=8").data
    assert num_rows("s3://far/away", section, seed=0, plugins=PluginsSection()) == 3


def test_blend_is_validated_on_the_blend_until_a_split_is_read_whole(tmp_path):
    for name, valid in (("a", 100), ("b", 30)):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name, train=(500,), valid=(valid,))
    sources = f"[{{path: {tmp_path}/a, weight: 0.5}}, {{path: {tmp_path}/b, weight: 0.5}}]"
    data = _job(f"data.sources={sources}", "data.path=none")
    assert open_validation(data)[""].num_samples == 6  # b has 3 windows


@pytest.mark.parametrize("samples", [1, 7, 16, 17, 40, 41, 100])
def test_steps_for_samples_are_the_fewest(samples):
    ramp = "[{until_samples: 5, global_batch_size: 2}, {until_samples: 20, global_batch_size: 4}]"
    section = _job(f"data.batch_ramp={ramp}", "data.global_batch_size=8").data
    steps = steps_for(samples, section)
    assert samples_after(steps, section) >= samples > samples_after(steps - 1, section)
