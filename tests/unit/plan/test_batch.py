"""Batches: every grid reads the same samples, the tail is masked."""

from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.batch import RampStage, batch_at, make_batch, phases

sizes = st.integers(1, 40)


@given(total=sizes, micro=st.integers(1, 5), dp=st.integers(1, 7), first=st.integers(0, 10**6))
def test_every_sample_is_read_exactly_once_on_any_grid(total, micro, dp, first):
    batch = make_batch(global_batch_size=total, micro_batch_size=micro, dp=dp)
    read = [
        sample
        for rank in range(dp)
        for m in range(batch.num_micro_batches)
        for sample in batch.samples(m, rank, first)
    ]
    assert sorted(s for s in read if s >= 0) == list(range(first, first + total))
    assert sum(s < 0 for s in read) == batch.num_masked


def test_batch_of_16_at_dp3_masks_two_slots():
    batch = make_batch(global_batch_size=16, micro_batch_size=1, dp=3)
    assert (batch.num_micro_batches, batch.num_masked) == (6, 2)
    assert batch.samples(5, 0, 0) == (15,) and batch.samples(5, 1, 0) == (-1,)


def _ramp(*stages):
    return tuple(RampStage(until_samples=until, batch=_batch(size)) for until, size in stages)


def _batch(size):
    return make_batch(global_batch_size=size, micro_batch_size=2, dp=2)


def _sizes(ramp, batch, steps):
    """Batch sizes of the first steps, each chosen by the samples before it only."""
    samples, sizes = 0, []
    for _ in range(steps):
        size = batch_at(ramp, batch, samples).global_batch_size
        sizes.append(size)
        samples += size
    return sizes


def test_ramp_goes_up_at_its_sample_counts():
    assert _sizes(_ramp((8, 4), (24, 8)), _batch(16), 6) == [4, 4, 8, 8, 16, 16]


def test_stage_that_its_batch_does_not_divide_ends_with_the_step_that_reaches_it():
    assert _sizes(_ramp((10, 4), (24, 8)), _batch(16), 7) == [4, 4, 4, 8, 8, 16, 16]


def test_stage_that_the_one_before_overshoots_is_passed_over():
    ramp = _ramp((5, 4), (7, 6), (24, 8))
    assert _sizes(ramp, _batch(16), 5) == [4, 4, 8, 8, 16]
    assert [phase.batch.global_batch_size for phase in phases(ramp, _batch(16))] == [4, 8, 16]


ends = st.lists(st.integers(1, 200), min_size=0, max_size=4, unique=True).map(sorted)


@given(ends=ends, sizes=st.lists(st.integers(1, 30), min_size=5, max_size=5))
def test_phases_tell_every_step_of_the_run(ends, sizes):
    ramp = _ramp(*zip(ends, sizes, strict=False))
    told = [
        phase.batch.global_batch_size
        for phase in phases(ramp, _batch(sizes[-1]))
        for _ in range(phase.num_steps or 3)
    ]
    assert told == _sizes(ramp, _batch(sizes[-1]), len(told))
    first = 1
    for phase in phases(ramp, _batch(sizes[-1])):
        assert phase.first_step == first
        assert phase.first_sample == sum(told[: first - 1])
        first += phase.num_steps


@given(dp=st.integers(1, 5), micro=st.integers(1, 4), samples=st.integers(0, 60))
def test_ramp_is_the_same_on_any_grid(dp, micro, samples):
    def size(dp, micro):
        def batch(size):
            return make_batch(global_batch_size=size, micro_batch_size=micro, dp=dp)

        ramp = [
            RampStage(until_samples=20, batch=batch(3)),
            RampStage(until_samples=40, batch=batch(7)),
        ]
        return batch_at(ramp, batch(11), samples).global_batch_size

    assert size(dp, micro) == size(1, 1)
