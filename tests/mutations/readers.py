"""Planted mistakes in how a corpus is read, cut and joined, and the form that then gives another dataset.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutations.saves import SaveMutation as ReaderMutation

READER_MUTATIONS = (
    ReaderMutation(
        name="a piece of a file begins with the rest of a line",
        file="prepare/readers/lines.py",
        old="is_skipping = opened.piece.start > 0",
        new="is_skipping = False",
        caught="jsonl: refused",
    ),
    ReaderMutation(
        name="the last line of a piece is not read to its end",
        file="prepare/readers/lines.py",
        old="    for block in opened.blocks_beyond():\n",
        new="    for block in ():\n",
        caught="jsonl: refused",
    ),
    ReaderMutation(
        name="the first frame of a file is left out",
        file="prepare/readers/frames.py",
        old="return [0, *starts[1:]]",
        new="return starts[1:]",
        caught="jsonl-zst-frames: other tokens",
    ),
    ReaderMutation(
        name="a task reads the row groups of the others too",
        file="prepare/readers/tables.py",
        old="range(table.num_row_groups)[opened.piece.start : opened.piece.end]",
        new="range(table.num_row_groups)[opened.piece.start :]",
        caught="parquet: other tokens",
    ),
    ReaderMutation(
        name="a task leaves its last record batch out",
        file="prepare/readers/tables.py",
        old="batches[opened.piece.start : opened.piece.end]",
        new="batches[opened.piece.start : opened.piece.end - 1]",
        caught="arrow-file: other tokens",
    ),
    ReaderMutation(
        name="caches in a folder of datasets are read",
        file="prepare/readers/listing.py",
        old="            if other.removeprefix(prefix) not in wanted:\n",
        new="            if other.removeprefix(prefix) not in wanted and other.endswith('.json'):\n",
        caught="datasets-folder: other tokens",
    ),
    ReaderMutation(
        name="the split goes by where a document stands",
        file="prepare/shards.py",
        old="split_of(document.text, valid_fraction)",
        new="split_of(document.name, valid_fraction)",
        caught="jsonl: other split",
    ),
    ReaderMutation(
        name="a document across the end of a shard is lost",
        file="prepare/assembly.py",
        old="if plan.start <= at < plan.stop:",
        new="if plan.start <= at and at + len(document[0]) <= plan.stop:",
        caught="jsonl: other tokens",
    ),
    ReaderMutation(
        name="rows are counted from the start of a piece",
        file="prepare/assembly.py",
        old="row += num_rows",
        new="row += 0",
        caught="jsonl: other rows",
    ),
    ReaderMutation(
        name="blank rows do not count",
        file="prepare/documents.py",
        old="self.num_rows[-1] = entry.row + 1",
        new="self.num_rows[-1] += bool(entry.text)",
        caught="jsonl: other rows",
    ),
    ReaderMutation(
        name="bytes that are not UTF-8 are dropped",
        file="prepare/documents.py",
        old='raw.decode("utf-8-sig")',
        new='raw.decode("utf-8-sig", "ignore")',
        caught="bad.txt: read",
    ),
    ReaderMutation(
        name="one bad line more is left out",
        file="prepare/documents.py",
        old="if len(self.bad) > self._max_bad_lines:",
        new="if len(self.bad) > self._max_bad_lines + 1:",
        caught="bad.txt: read",
    ),
    ReaderMutation(
        name="an unknown suffix is a text",
        file="prepare/readers/formats.py",
        old="if any(fnmatchcase(last, pattern) for pattern in patterns):",
        new="if last:",
        caught="bad.docx: read",
    ),
    ReaderMutation(
        name="an array may end anywhere",
        file="prepare/readers/lines.py",
        old="if is_array and not character:",
        new="if False:",
        caught="bad.json: read",
    ),
)
FORMS = ("jsonl", "jsonl-zst-frames", "parquet", "arrow-file", "datasets-folder")
BAD = {
    "bad.txt": b"caf\xe9",
    "bad.jsonl": b"{\n",
    "bad.docx": b"text",
    "bad.json": b'[{"text": "a"}',
}


def outcome(folder: Path) -> str:
    """Return ``sound``, or the first form of the corpus or bad file with which something is wrong."""
    from tests.unit.prepare import corpora

    texts = corpora.texts()
    forms = corpora.every_form(texts)
    for form in FORMS:
        (folder / form).mkdir()
        forms[form](folder / form)
        wrong = _wrong(folder / form, texts)
        if wrong:
            return f"{form}: {wrong}"
    for name, raw in BAD.items():
        (folder / "bad").mkdir(exist_ok=True)
        for path in (folder / "bad").iterdir():
            path.unlink()
        (folder / "bad" / name).write_bytes(raw)
        if _wrong(folder / "bad", []) != "refused":
            return f"{name}: read"
    return "sound"


def _wrong(folder: Path, texts: list[str]) -> str:
    """Read and join a folder, and return in what the dataset is not that of the texts."""
    from raymega.errors import ConfigError
    from raymega.prepare.origins import decode_origins

    try:
        shards = _shards(folder)
    except ConfigError:
        return "refused"
    # What is expected is made of the texts, without the package but for the hash.
    from raymega.prepare.sources import split_of

    for split in ("train", "valid"):
        rows = [i for i, text in enumerate(texts) if text and split_of(text, 0.1) == split]
        expected = [[*texts[row].encode(), 256] for row in rows]
        found = [
            list(map(int, each)) for path in shards.get(split, []) for each in _documents(path)
        ]
        if found != expected:
            return (
                "other split"
                if sorted(found) != sorted(expected) and _same(shards, texts)
                else "other tokens"
            )
        origins = [
            decode_origins(p.with_suffix(".origins").read_bytes()) for p in shards.get(split, [])
        ]
        if folder.name == "datasets-folder":
            continue
        if [row for each in origins for _, row in each.tolist()] != rows:
            return "other rows"
    return ""


def _same(shards: dict[str, list[Path]], texts: list[str]) -> bool:
    found = [
        bytes(each[:-1]) for paths in shards.values() for path in paths for each in _documents(path)
    ]
    return sorted(found) == sorted(text.encode() for text in texts if text)


def _documents(path: Path) -> list[list[int]]:
    from raymega.data.arrow import shard_documents

    return [tokens.tolist() for tokens, *_ in shard_documents(path)]


def _shards(folder: Path) -> dict[str, list[Path]]:
    from raymega.data.format import TOKENIZER_FILE
    from raymega.errors import ConfigError, raise_faults
    from raymega.prepare import assembly, groups
    from raymega.prepare.shards import write_group
    from raymega.prepare.sources import list_files
    from raymega.prepare.tokenizer.encoder import EncodingRules
    from raymega.prepare.tokenizer.trained import byte_tokenizer

    groups.MIN_GROUP_BYTES, assembly.SHARD_TOKENS = 1 << 12, 1 << 14
    made = groups.make_groups(list_files([str(folder)], include=["*"], exclude=[]))
    made = groups.with_keys(made, {})
    state, final = Path(f"{folder}-state"), Path(f"{folder}-final")
    state.mkdir(exist_ok=True)
    (state / TOKENIZER_FILE).write_text(byte_tokenizer())
    rules = EncodingRules(eod_id=256)
    reports = [write_group(group, folder=state, valid_fraction=0.1, rules=rules) for group in made]
    raise_faults(ConfigError, [fault for report in reports for fault in report.faults])
    for plan in assembly.plan_shards(made, reports):
        assembly.write_shard(plan, state=state, folder=final, dtype="uint16")
    return {name: sorted(final.glob(f"{name}/*.arrow")) for name in ("train", "valid")}
