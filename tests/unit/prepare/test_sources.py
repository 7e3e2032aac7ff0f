import os
from itertools import pairwise

import pytest

from raymega.errors import ConfigError
from raymega.prepare import sources
from raymega.prepare.sources import files_digest, list_files, make_groups, split_of

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


def test_groups_hold_every_byte_once_whatever_their_size(tree, monkeypatch):
    (tree / "lines.jsonl").write_text("x" * 100)
    monkeypatch.setattr(sources, "MIN_GROUP_BYTES", 32)
    monkeypatch.setattr(sources, "ENOUGH_GROUPS", 4)
    files = list_files([str(tree)], include=["*"], exclude=[])
    groups = make_groups(files)
    assert len(groups) > 3 and [group.index for group in groups] == list(range(len(groups)))
    ranges = sorted((p.file.name, p.start, p.end) for group in groups for p in group.pieces)
    assert [r for r in ranges if r[0] != "lines.jsonl"] == [(n, 0, len(n)) for n in sorted(TREE)]
    lines = [(start, end) for name, start, end in ranges if name == "lines.jsonl"]
    assert lines[0][0] == 0 and lines[-1][1] == 100 and len(lines) > 2
    assert all(a[1] == b[0] for a, b in pairwise(lines))


def test_groups_do_not_depend_on_where_the_corpus_lies(tree, tmp_path_factory):
    names = [piece.file.name for piece in make_groups(_files(tree))[0].pieces]
    assert sorted(names) == sorted(TREE) and names != sorted(TREE)
    moved = tree.rename(tmp_path_factory.mktemp("moved") / "corpus")
    assert [piece.file.name for piece in make_groups(_files(moved))[0].pieces] == names


def test_digest_changes_with_names_sizes_and_times(tree):
    first = files_digest(_files(tree))
    assert files_digest(_files(tree)[::-1]) == first
    os.utime(tree / "a.py", ns=(0, 0))
    assert files_digest(_files(tree)) != first


def test_held_out_share_is_the_fraction_and_grows_with_it():
    names = [f"{i}.py" for i in range(2000)]
    held = {f: {n for n in names if split_of(n, f) == "valid"} for f in (0.0, 0.05, 0.2)}
    assert not held[0.0] and 70 < len(held[0.05]) < 130 and 340 < len(held[0.2]) < 460
    assert held[0.05] < held[0.2]


def _files(folder):
    return list_files([str(folder)], include=["*"], exclude=[])
