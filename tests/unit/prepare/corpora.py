"""One corpus in every form that is read, and preparations without Ray."""

import bz2
import gzip
import json
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

NUM_TEXTS = 80
WORDS = ("alpha", "beta", "caf\u00e9", "\u4e2d\u6587", "\U0001f600", '"quoted"', "two\nlines")


def texts():
    """Texts of up to 150 words, and some that compresses badly; one is empty."""
    draw = Random(7)
    found = [
        f"text {i} {draw.randbytes(200).hex()} "
        + " ".join(draw.choices(WORDS, k=draw.randrange(150)))
        for i in range(NUM_TEXTS)
    ]
    found[3] = ""
    return found


def json_lines(found, **more):
    return "".join(
        json.dumps({"id": i, "text": t} | more) + "\n" for i, t in enumerate(found)
    ).encode()


def zstd(raw):
    return pa.Codec("zstd").compress(raw, asbytes=True)


def bgzip(raw):
    """Blocks as bgzip writes them: members with their size in the header."""
    members = []
    for start in range(0, len(raw), 5_000):
        member = gzip.compress(raw[start : start + 5_000], mtime=0)
        extra = b"\x06\x00BC\x02\x00" + (len(member) + 8 - 1).to_bytes(2, "little")
        members.append(member[:3] + b"\x04" + member[4:10] + extra + member[10:])
    return b"".join(members)


def cut(raw, num_parts=5):
    """Parts that end anywhere, as frames do."""
    size = len(raw) // num_parts + 3
    return [raw[start : start + size] for start in range(0, len(raw), size)]


def write_bytes(name, raw):
    def write(folder):
        (folder / name).write_bytes(raw)

    return write


def write_parquet(found, name="corpus.parquet"):
    def write(folder):
        pq.write_table(_table(found), folder / name, row_group_size=17)

    return write


def write_arrow(found, name="corpus.arrow", *, is_file=True):
    def write(folder):
        make = pa.ipc.new_file if is_file else pa.ipc.new_stream
        with make(str(folder / name), _table(found).schema) as writer:
            writer.write_table(_table(found), max_chunksize=13)

    return write


def write_hf_folder(found):
    """The files of `datasets.Dataset.save_to_disk`, and one of its caches."""

    def write(folder):
        names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
        for name, part in zip(names, (found[:40], found[40:]), strict=True):
            write_arrow(part, name, is_file=False)(folder)
        write_arrow(["a cache"], "cache-1234.arrow", is_file=False)(folder)
        listed = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
        (folder / "state.json").write_text(json.dumps(listed))
        (folder / "dataset_info.json").write_text('{"features": {}}')

    return write


def write_texts(found):
    def write(folder):
        for i, text in enumerate(found):
            (folder / f"{i:03d}.txt").write_text(text)

    return write


def every_form(found):
    """Functions that write the corpus into a folder, by the name of the form."""
    raw = json_lines(found)
    objects = [{"text": text, "id": i} for i, text in enumerate(found)]
    return {
        "jsonl": write_bytes("corpus.jsonl", raw),
        "jsonl-without-last-newline": write_bytes("corpus.jsonl", raw.rstrip(b"\n")),
        "jsonl-with-windows-newlines": write_bytes("corpus.jsonl", raw.replace(b"\n", b"\r\n")),
        "jsonl-with-mark": write_bytes("corpus.jsonl", b"\xef\xbb\xbf" + raw),
        "jsonl-gz": write_bytes("corpus.jsonl.gz", gzip.compress(raw)),
        "jsonl-gz-members": write_bytes("corpus.jsonl.gz", b"".join(map(gzip.compress, cut(raw)))),
        "jsonl-bgzip": write_bytes("corpus.jsonl.gz", bgzip(raw)),
        "jsonl-zst": write_bytes("corpus.jsonl.zst", zstd(raw)),
        "jsonl-zst-frames": write_bytes("corpus.jsonl.zst", b"".join(map(zstd, cut(raw)))),
        "jsonl-bz2": write_bytes("corpus.jsonl.bz2", bz2.compress(raw)),
        "jsonl-bz2-streams": write_bytes("corpus.jsonl.bz2", b"".join(map(bz2.compress, cut(raw)))),
        "ndjson": write_bytes("corpus.ndjson", raw),
        "json-array": write_bytes("corpus.json", json.dumps(objects, indent=1).encode()),
        "json-array-of-characters": write_bytes(
            "corpus.json", json.dumps(objects, ensure_ascii=False).encode()
        ),
        "json-array-gz": write_bytes("corpus.json.gz", gzip.compress(json.dumps(objects).encode())),
        "json-sequence": write_bytes("corpus.json", raw),
        "parquet": write_parquet(found),
        "arrow-file": write_arrow(found),
        "arrow-stream": write_arrow(found, is_file=False),
        "datasets-folder": write_hf_folder(found),
        "texts": write_texts(found),
    }


def prepared(folder, out, **changes):
    """Prepare a folder; needs the fixture ``without_ray`` or a session."""
    from raymega.prepare.options import PrepareOptions
    from raymega.prepare.pipeline import prepare  # here, as importing Ray takes seconds

    values = {"tokenizer": "bytes", "valid_fraction": 0.1, "address": "local"} | changes
    options = PrepareOptions(inputs=(str(folder),), out=str(out), **values)
    return prepare(options, on_progress=lambda *_: None)


def content(folder, *, but=()):
    """The bytes of a folder's files by name."""
    found = sorted(Path(folder).rglob("*"))
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {n: p.read_bytes() for n, p in names.items() if p.is_file() and n not in but}


def _table(found):
    return pa.table({"id": list(range(len(found))), "text": found})
