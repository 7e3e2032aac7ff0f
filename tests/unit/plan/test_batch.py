"""Batches: every grid reads the same samples, the tail is masked."""

from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.batch import make_batch

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
