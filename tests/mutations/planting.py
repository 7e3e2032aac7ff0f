"""A mistake planted in this process: a module of the package that is imported from other source than its file's.

It must be planted before the module is imported. All other modules are loaded from the repository, with their
bytecode, so that no copy of the package has to be written and compiled.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode() if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, float]:
        # without it no bytecode is read or written
        raise OSError(f"{path} is planted")


class _Finder(MetaPathFinder):
    def __init__(self, package: Path, file: str, text: str) -> None:
        self._path, self._text = str(package / file), text
        self.name = ".".join((package.name, *Path(file).with_suffix("").parts))

    def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        return spec_from_file_location(
            name, self._path, loader=_Loader(name, self._path, self._text)
        )


def plant(package: str, file: str, text: str) -> None:
    """Let ``file`` of the package in the folder ``package`` have this source, in place of any planted before.

    Raises:
        RuntimeError: The module is loaded already.
    """
    uproot()
    finder = _Finder(Path(package), file, text)
    if finder.name in sys.modules:
        raise RuntimeError(f"{finder.name} is loaded already")
    sys.meta_path.insert(0, finder)


def uproot() -> None:
    """Plant nothing in what is imported from now on."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
