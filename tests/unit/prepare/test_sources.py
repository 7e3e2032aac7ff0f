import os
import re
from itertools import pairwise

import pytest

from raymega.errors import ConfigError
from raymega.prepare import groups
from raymega.prepare.groups import make_groups, with_keys
from raymega.prepare.sources import files_digest, list_files, split_of

TREE = ("a.py", "b.txt", "test/c.py", "pkg/d.py", "pkg/test/e.py", "pkg/idle/f.py", "my test.py")


@pytest.fixture
def tree(tmp_path):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def _names(*inputs, include=("*",), exclude=()):
    files = list_files([str(path) for path in inputs], include=include, exclude=exclude)
    return [file.name for file in files]


def test_folder_is_read_to_the_bottom_in_order_of_names(tree):
    assert _names(tree) == sorted(TREE)
    assert _names(f"file://{tree}") == sorted(TREE)


@pytest.mark.parametrize(
    "include, exclude, expected",
    [
        (["*.py"], ["test/"], ["a.py", "my test.py", "pkg/d.py", "pkg/idle/f.py"]),
        (["*.py"], ["test", "pkg/idle"], ["a.py", "my test.py", "pkg/d.py"]),
        (["pkg/*"], ["*/test"], ["pkg/d.py", "pkg/idle/f.py"]),
        (["*.txt", "a.*"], [], ["a.py", "b.txt"]),
    ],
    ids=["any-test", "one-folder", "leading-folders", "two-includes"],
)
def test_patterns_select(tree, include, exclude, expected):
    assert _names(tree, include=include, exclude=exclude) == expected


def test_named_file_is_read_whatever_the_patterns_say_and_only_once(tree):
    assert _names(tree / "b.txt", include=["*.py"]) == ["b.txt"]
    assert _names(tree / "a.py", tree, tree, include=["*.py"], exclude=["test", "pkg"]) == [
        "a.py",
        "my test.py",
    ]


def test_all_bad_inputs_are_reported_at_once(tree):
    with pytest.raises(ConfigError) as caught:
        _names(tree, tree / "none", "gopher://x/y")
    assert [fault.fact.partition(":")[0] for fault in caught.value.faults] == [
        f"INPUT '{tree}/none' cannot be read",
        "INPUT 'gopher",
    ]
    with pytest.raises(ConfigError, match=r"none of --exclude \(nothing\)"):
        _names(tree, include=["*.rs"])


def test_order_is_that_of_names_without_suffixes(tree):
    for name in ("c.txt.gz", "c.jsonl", "b.z.md"):
        (tree / name).write_bytes(b"")
    names = _names(tree, include=["*.txt", "*.gz", "*.jsonl", "*.md"])
    assert names == ["b.txt", "b.z.md", "c.jsonl", "c.txt.gz"]


@pytest.mark.parametrize("name", ["a.xyz", "a.xyz.gz", "Makefile", "a.exe", "a.tar.gz", ".hidden"])
def test_unknown_suffix_is_refused_by_name_and_admitted_by_name(tree, name):
    (tree / name).write_text("a text")
    with pytest.raises(
        ConfigError, match=rf"no known suffix: {re.escape(str(tree / name))};"
    ) as caught:
        _names(tree)
    line = re.search(
        r"read them as texts with (--include '(\S+)' --include '\*')", str(caught.value)
    )
    assert sorted(_names(tree, include=[line[2], "*"])) == sorted((*TREE, name))
    left_out = re.search(r"leave them out with --exclude '(\S+)'", str(caught.value))
    assert _names(tree, exclude=[left_out[1]]) == sorted(TREE)
    with pytest.raises(ConfigError, match="no known suffix"):
        _names(tree / name)


def test_own_folders_are_not_read(tree):
    for folder in ("_state", "_report", "pkg/_state"):
        (tree / folder).mkdir()
        (tree / folder / "a.jsonl").write_text("{}")
    assert _names(tree, include=["*.jsonl"]) == ["pkg/_state/a.jsonl"]


def test_link_to_a_file_is_read_and_one_to_a_folder_or_to_nothing_is_refused(tree):
    (tree / "link.txt").symlink_to("b.txt")
    assert "link.txt" in _names(tree)
    (tree / "pkg" / "loop").symlink_to("..")
    (tree / "gone.txt").symlink_to("nowhere")
    with pytest.raises(ConfigError) as caught:
        _names(tree)
    assert [fault.fact for fault in caught.value.faults] == [
        f"{tree}/gone.txt cannot be read: No such file or directory",
        f"{tree}/pkg/loop is a link to the folder ..",
    ]
    assert _names(tree, exclude=["loop", "gone.txt", "link.txt"]) == sorted(TREE)
    (tree.parent / "alias").symlink_to(tree)
    assert _names(tree.parent / "alias", exclude=["loop", "gone.txt", "link.txt"]) == sorted(TREE)


def test_name_that_is_not_utf8_is_refused(tree):
    (tree / os.fsdecode(b"caf\xe9.txt")).write_text("a text")
    with pytest.raises(ConfigError, match=r"/caf\\udce9\.txt has a name that is not UTF-8"):
        _names(tree)
    assert _names(tree, exclude=["caf*"]) == sorted(TREE)


def test_datasets_folder_that_lacks_a_file_is_refused(tree):
    (tree / "hf").mkdir()
    (tree / "hf" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (tree / "hf" / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf/data-0\.arrow is missing; hf/state\.json lists it"):
        _names(tree)


def test_groups_hold_every_byte_once_whatever_their_size(tree, monkeypatch):
    (tree / "lines.jsonl").write_text("x" * 100)
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 32)
    monkeypatch.setattr(groups, "ENOUGH_GROUPS", 4)
    made = make_groups(_files(tree))
    assert len(made) > 3 and [group.index for group in made] == list(range(len(made)))
    ranges = [(p.file.name, p.start, p.end) for group in made for p in group.pieces]
    assert sorted(r for r in ranges if r[0] != "lines.jsonl") == [
        (n, 0, len(n)) for n in sorted(TREE)
    ]
    lines = [(start, end) for name, start, end in ranges if name == "lines.jsonl"]
    assert lines[0][0] == 0 and lines[-1][1] == 100 and len(lines) > 2
    assert all(a[1] == b[0] for a, b in pairwise(lines))


def test_groups_do_not_depend_on_where_the_corpus_lies(tree, tmp_path_factory):
    names = [piece.file.name for piece in make_groups(_files(tree))[0].pieces]
    assert names == sorted(TREE)
    moved = tree.rename(tmp_path_factory.mktemp("moved") / "corpus")
    assert [piece.file.name for piece in make_groups(_files(moved))[0].pieces] == names


def test_changed_file_changes_the_key_of_its_own_group_only(tree, monkeypatch):
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 8)
    monkeypatch.setattr(groups, "ENOUGH_GROUPS", 100)
    before = [group.key for group in with_keys(make_groups(_files(tree)), {"a": "b"})]
    os.utime(tree / "b.txt", ns=(0, 0))
    after = [group.key for group in with_keys(make_groups(_files(tree)), {"a": "b"})]
    assert len(set(before)) == len(before) > 3
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    other = [group.key for group in with_keys(make_groups(_files(tree)), {"a": "c"})]
    assert not set(after) & set(other)


def test_digest_changes_with_names_sizes_and_times(tree):
    first = files_digest(_files(tree))
    assert files_digest(_files(tree)) == first
    os.utime(tree / "a.py", ns=(0, 0))
    assert files_digest(_files(tree)) != first


def test_held_out_share_is_the_fraction_and_grows_with_it():
    names = [f"text {i}" for i in range(2000)]
    held = {f: {n for n in names if split_of(n, f) == "valid"} for f in (0.0, 0.05, 0.2)}
    assert not held[0.0] and 70 < len(held[0.05]) < 130 and 340 < len(held[0.2]) < 460
    assert held[0.05] < held[0.2]


def _files(folder):
    return list_files([str(folder)], include=["*"], exclude=[])
