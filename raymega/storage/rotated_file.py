"""A file of lines in parts, each closed at a size, and readers of all its parts.

Parts are ``NAME.00001.EXT`` and so on, oldest first; ``NAME.EXT`` is the newest. Where all
together exceed a size, the largest closed part keeps one in ten of the lines that may be thinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

PART_BYTES = 32 * 2**20
"""Size from which on a part is closed."""
MOST_BYTES = 512 * 2**20
"""Size of all parts from which on closed ones are thinned."""
KEEP_EACH = 10
"""Number of lines of a kind in a part that is thinned, for each that stays."""


class RotatedFile:
    """Text file that is appended to line by line, from one thread; closed parts are thinned in another."""

    def __init__(
        self,
        path: Path,
        *,
        kind_of: Callable[[str], str],
        part_bytes: int = PART_BYTES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Append to ``path``.

        Args:
            path: Newest part; its folder exists.
            kind_of: Function that returns the kind of a line that may be thinned, or '' for one that may not.
            part_bytes: Size of a part.
            most_bytes: Size of all parts.
        """
        self._path, self._kind_of = path, kind_of
        self._part_bytes, self._most_bytes = part_bytes, most_bytes
        self._file = path.open("a", encoding="utf-8")
        self._num_bytes = path.stat().st_size
        self._thread = Thread()

    def write(self, text: str) -> int:
        """Append one line with its end; see TextIO."""
        if self._num_bytes >= self._part_bytes:
            self._rotate()
        self._num_bytes += len(text)
        return self._file.write(text)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file, and wait until no part is being thinned."""
        self._file.close()
        self._wait()

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _rotate(self) -> None:
        self._file.close()
        *_, newest = (0, *(number for number, _ in _closed_parts(self._path)))
        self._path.rename(_part(self._path, newest + 1))
        self._file, self._num_bytes = self._path.open("a", encoding="utf-8"), 0
        self._wait()  # parts take hours to fill, and a moment to thin
        self._thread = Thread(target=self._thin, name="thin-parts", daemon=True)
        self._thread.start()

    def _thin(self) -> None:
        """Thin the largest closed part, the oldest first, until all fit or none shrinks."""
        sizes = {path: path.stat().st_size for _, path in _closed_parts(self._path)}
        excess = sum(sizes.values()) - (self._most_bytes - self._part_bytes)
        while excess > 0 and sizes:
            largest = max(sizes, key=lambda path: sizes[path])
            thin(largest, self._kind_of)
            before, sizes[largest] = sizes[largest], largest.stat().st_size
            excess -= before - sizes[largest]
            if sizes[largest] > before / 2:  # what is left there may not be thinned
                del sizes[largest]


def thin(path: Path, kind_of: Callable[[str], str]) -> None:
    """Keep one line in KEEP_EACH of each kind in the file at ``path``, and the lines without a kind."""
    numbers: Counter[str] = Counter()
    copy = path.with_suffix(".tmp")
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        copy.open("w", encoding="utf-8") as new,
    ):
        for line in old:
            kind = kind_of(line)
            if not kind or numbers[kind] % KEEP_EACH == 0:
                new.write(line)
            numbers[kind] += 1
    copy.replace(path)  # a reader has the old part or the new one


def parts_of(path: Path) -> list[Path]:
    """Return the parts of the file at ``path``, oldest first, the newest last; it need not exist."""
    return [*(part for _, part in _closed_parts(path)), path]


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of all parts.

    Raises:
        OSError: The newest part cannot be read.
    """
    for _, _, line in read_placed_lines(path):
        yield line.decode("utf-8", errors="replace")


def read_placed_lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Yield the lines of all parts, each with its part and its first byte there.

    Raises:
        OSError: The newest part cannot be read.
    """
    for part in parts_of(path):
        byte = 0
        with part.open("rb") as lines:
            for line in lines:
                yield part, byte, line
                byte += len(line)


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:05}{path.suffix}")


def _closed_parts(path: Path) -> list[tuple[int, Path]]:
    found = []
    for part in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        number = part.name[len(path.stem) + 1 : -len(path.suffix)]
        if number.isdecimal():
            found.append((int(number), part))
    return sorted(found)
