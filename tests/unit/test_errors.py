"""Words of messages: numbers of things."""

import pytest

from raymega.errors import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "problem", "0 problems"),
        (1, "problem", "1 problem"),
        (2, "file", "2 files"),
        (1, "micro-batch", "1 micro-batch"),
        (12_345, "micro-batch", "12,345 micro-batches"),
    ],
)
def test_a_number_of_things_has_its_plural(number, noun, text):
    assert counted(number, noun) == text
