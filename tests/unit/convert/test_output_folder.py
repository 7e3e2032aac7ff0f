"""The folder of an export, whatever stands in its place."""

import pytest

from raymega.convert.output_folder import folder_faults, new_folder
from raymega.errors import ConfigError


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_written_through(tmp_path, is_there):
    """A folder cannot take the name of a link: all was written, and then it failed."""
    target, link = tmp_path / "large disk", tmp_path / "out"
    if is_there:
        target.mkdir()
    link.symlink_to(target)
    assert not list(folder_faults(link))
    with new_folder(link) as partial:
        (partial / "a").write_text("1")
    assert (target / "a").read_text() == "1" and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large disk", "out"]


def test_a_place_that_takes_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written: "), new_folder(tmp_path / "file/out"):
        pass
