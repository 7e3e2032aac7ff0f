"""Writes all goldens anew: ``python -m tests.golden.write``. Tests never do.

To be read as a diff afterwards: a golden says what users see, and what programs rely on.
"""

from __future__ import annotations

import os

# As tests/conftest.py, before torch and ray are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"

import difflib
import logging

from tests.golden.compare import FILES, stored, stored_names
from tests.golden.produce import units
from tests.golden.refusals import refused
from tests.golden.sites import problems


def main() -> None:
    """Make, write and tell."""
    logging.getLogger().addHandler(logging.NullHandler())  # as under pytest: logs are no output
    made = {name: text for unit in units() for name, text in unit.make().items()}
    changed = 0
    for name, text in sorted(made.items()):
        changed += _write(name, text)
    for name in sorted(stored_names() - made.keys()):
        (FILES / name).unlink()
        print(f"{name}: removed")
        changed += 1
    print(f"{changed} of {len(made)} goldens changed")
    _tell_what_is_missing("\n".join(made.values()))


def _write(name: str, text: str) -> bool:
    """Whether it is another text than before."""
    before, path = stored(name), FILES / name
    if before == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if before is None:
        print(f"{name}: new, {len(text.splitlines())} lines")
        return True
    lines = list(difflib.ndiff(before.splitlines(), text.splitlines()))
    counts = {sign: sum(line.startswith(sign) for line in lines) for sign in "+-"}
    print(f"{name}: {counts['+']} lines added, {counts['-']} removed")
    return True


def _tell_what_is_missing(told: str) -> None:
    """What no golden can heal: cases that are to be written by hand."""
    found = refused()
    for problem in (*found.wrong, *problems(found.reached, told)):
        print(f"still red: {problem}")


if __name__ == "__main__":
    main()
