"""Every planted mistake of every table is a program: its text stands in the package, and its names exist."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.mutations.planted import all_rows, planted_text, undefined_names
from tests.scale.test_planted import ROWS as SCALE_ROWS

SCALE = [
    SimpleNamespace(name=name, file=file, old=old, new=new)
    for name, (file, old, new, _) in SCALE_ROWS.items()
]
TABLES = {**all_rows(), "scale": SCALE}


def test_every_row_still_fits_the_package(tmp_path):
    stale, texts = [], {}
    for module, rows in TABLES.items():
        for row in rows:
            try:
                texts[f"{module}: {row.name}"] = planted_text(row)
            except ValueError as error:
                stale.append(str(error))
    assert stale == []
    names, dead = list(texts), undefined_names(texts.values(), tmp_path)
    assert {names[place]: said for place, said in dead.items()} == {}


def test_names_of_a_table_differ():
    for rows in TABLES.values():
        assert max(Counter(row.name for row in rows).values()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(a):\n    return rows\n", "`rows`"),
        ("def f(a):\n    b = c\n    c = a\n    return b\n", "`c`"),
        ("def f(a:\n", "syntax"),
    ],
    ids=["undefined", "too early", "no Python"],
)
def test_text_that_would_die_of_its_names_is_refused(text, said, tmp_path):
    (found,) = undefined_names(["def f(a):\n    return a\n", text], tmp_path).items()
    assert found[0] == 1 and said in found[1]
