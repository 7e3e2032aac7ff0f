from itertools import pairwise

import pytest

from raymega.data.order import permute, sample_window


@pytest.mark.parametrize("size", [*range(1, 70), 99, 100, 101, 1000, 4096, 10007])
def test_permute_is_a_bijection(size):
    assert sorted(permute(i, size, key=b"k") for i in range(size)) == list(range(size))


def test_permute_mixes():
    order = [permute(i, 1000, key=b"k") for i in range(1000)]
    num_near = sum(abs(a - b) < 20 for a, b in pairwise(order))
    num_fixed = sum(i == window for i, window in enumerate(order))
    assert num_near < 80 and num_fixed < 10  # 39 and 1 expected of a random order


def test_each_epoch_visits_every_window_in_an_order_of_its_own():
    epochs = [[sample_window(7, 100, 100 * e + i) for i in range(100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seeds_give_different_orders():
    assert [sample_window(1, 100, i) for i in range(9)] != [
        sample_window(2, 100, i) for i in range(9)
    ]


def test_order_never_changes():
    # A run that is resumed by a later version must see the same data.
    assert [sample_window(1234, 1000, sample) for sample in (0, 1, 999, 1000)] == [
        664,
        715,
        303,
        717,
    ]
