"""From a URI to a store, and what is said when there is none."""

import pytest

from raymega.data.format import local_folder
from raymega.errors import ConfigError
from raymega.storage.registry import apart_faults, folder_faults, open_store, store_faults


def test_path_and_file_uri_name_the_same_store(tmp_path):
    root = tmp_path / "a b"
    open_store(str(root)).put("k", [b"x"], overwrite=False)
    for uri in (f"file://{root}", f"file://localhost{tmp_path}/a%20b", f"FILE://{root}"):
        assert open_store(uri).get("k") == b"x"
        assert open_store(uri).uri == str(root)


@pytest.mark.parametrize("name", ["exp#2", "exp?2", "a;b", "50%"])
def test_runs_below_a_folder_with_odd_characters_have_folders_of_their_own(tmp_path, name):
    """What followed a '#' or a '?' was dropped: all runs of such a checkpoint.uri had one folder."""
    for root in (f"{tmp_path}/{name}", f"file://{tmp_path}/{name.replace('%', '%25')}"):
        assert open_store(f"{root}/run").uri == f"{tmp_path}/{name}/run"
        assert local_folder(f"{root}/run") == tmp_path / name / "run"


@pytest.mark.parametrize(
    ("uri", "rule", "remedy"),
    [
        (
            "fiel:///runs",
            "'fiel' is unknown; known are file, s3 and plain paths",
            "nearest is file://",
        ),
        ("s4://bucket", "'s4' is unknown", "nearest is s3://"),
        ("file://runs/a", "names 'runs'", "three slashes"),
        ("", "must name a folder", "give a path"),
    ],
)
def test_unusable_uri_is_one_fault_that_names_the_way_out(uri, rule, remedy):
    (fault,) = store_faults(uri)
    assert fault.fact == f"checkpoint.uri={uri!r}"
    assert rule in fault.rule and remedy in fault.remedy
    with pytest.raises(ConfigError):
        open_store(uri)


def test_writable_root_has_no_fault_and_keeps_no_litter(tmp_path):
    assert store_faults(str(tmp_path / "new" / "run")) == []
    assert store_faults(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_root_below_a_file_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("x")
    (fault,) = store_faults(str(tmp_path / "file" / "run"), field="URI")
    assert fault.fact.startswith("URI=") and "cannot be written to: Not a directory" in fault.fact


def test_root_where_no_file_can_be_made_is_a_fault():
    (fault,) = store_faults("/proc/raymega-run")
    assert "/proc/raymega-run" in fault.fact and "cannot be written to" in fault.fact


def test_folder_of_the_nodes_is_no_object_store():
    assert folder_faults("/nvme/runs", field="f") == folder_faults("file:///nvme", field="f") == []
    for uri in ("s3://bucket/runs", "gs://bucket", ""):
        (fault,) = folder_faults(uri, field="checkpoint.local_uri")
        assert fault.fact.startswith(f"checkpoint.local_uri={uri!r}")


def test_folder_whose_files_go_is_no_other_store(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    names = {"field": "checkpoint.local_uri", "other_field": "checkpoint.uri"}
    runs = str(tmp_path / "runs")
    for same in (runs, f"{runs}/", f"file://{runs}", str(tmp_path / "link"), f"{runs}/../runs"):
        (fault,) = apart_faults(same, other=runs, **names)
        assert fault.fact == f"checkpoint.local_uri={same!r} is the folder of checkpoint.uri too"
    assert apart_faults(str(tmp_path / "near"), other=runs, **names) == []
    assert apart_faults(runs, other="s3://bucket/runs", **names) == []
