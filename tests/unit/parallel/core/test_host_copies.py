"""Numbers that go to a device keep all their bits."""

import torch

from raymega.parallel.core.host_copies import to_device


def test_numbers_of_a_step_are_float64():
    numbers = [1 / 3, 2.0**53 - 1, 1e300, 0.0]
    found = to_device(numbers, torch.device("cpu"))
    assert found.tolist() == numbers
    assert found.dtype == torch.float64
