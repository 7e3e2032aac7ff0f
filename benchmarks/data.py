"""Tokens a CPU second of `data prepare`'s task, against the loops of Megatron's two preprocessing scripts.

    pip install --no-deps --target build/megatron megatron-core==0.16.1
    python -m benchmarks.data --tokenizer GPT2-FOLDER --megatron build/megatron --rounds 3

All sides read one file of JSON lines, encode it with the same tokenizer files, and write tokens with the end of
each document. megatron-core comes without the scripts: their inner loops are written out here, one process and
no pipe between reader and writer, with megatron-core's own tokenizer and `IndexedDatasetBuilder`. `classic` is
tools/preprocess_data.py: one document a call. `fast` is its gigatoken version: a batch of documents a call.
Each side runs in a process of its own; start-up (imports, parsing the tokenizer) is shown apart, and Ray's is in none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

SIDES = ("ours", "ours-tokenizers", "classic", "fast")
CORPUS_BYTES = 32 * 10**6
BATCH = 1024
"""Number of documents that the fast side encodes in one call."""
Work = Callable[[], "np.typing.NDArray[np.int64]"]


def main() -> None:
    """Run every side in turn, or the one that `--side` names, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokenizer", required=True, help="folder or file, as data prepare takes it"
    )
    parser.add_argument(
        "--megatron", default="", help="folder with megatron-core; without it, ours alone"
    )
    parser.add_argument(
        "--corpus",
        default="",
        help="file of JSON lines; default: Python's sources and its packages'",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the child process of one side
        if arguments.side:
            measure(arguments.side, arguments, folder)
            return
        arguments.corpus = arguments.corpus or str(write_corpus(folder / "corpus.jsonl"))
        compare(arguments, Path(write_tokenizer(arguments.tokenizer, folder / "tokenizer")))


def write_corpus(path: Path) -> Path:
    """Write the sources of Python and its installed packages as JSON lines, a file a document."""
    # a dictionary keeps the order, and drops a folder that is both
    folders = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    with path.open("w", encoding="utf-8") as file:
        for source in (source for folder in folders for source in sorted(folder.rglob("*.py"))):
            text = source.read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() > CORPUS_BYTES:
                break
    return path


def write_tokenizer(name: str, folder: Path) -> Path:
    """Write the files that a dataset carries, which all sides load."""
    from raymega.prepare.tokenizer.choice import (
        TokenizerOptions,
        choose_tokenizer,
        make_tokenizer,
    )

    folder.mkdir()
    for file, content in make_tokenizer(
        choose_tokenizer(TokenizerOptions(name=name)), []
    ).files.items():
        (folder / file).write_bytes(content)
    return folder


def compare(arguments: argparse.Namespace, tokenizer: Path) -> None:
    """Run the sides in turn, so that a busy machine slows all; print medians and ratios."""
    sides = SIDES if arguments.megatron else SIDES[:2]
    found: dict[str, list[dict[str, float | str]]] = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side in sides:
            command = [
                sys.executable, "-m", "benchmarks.data", "--side", side, "--tokenizer", str(tokenizer),
                "--megatron", arguments.megatron, "--corpus", arguments.corpus,
            ]  # fmt: skip
            ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[side].append(json.loads(ended.stdout.splitlines()[-1]))
    # All sides made the same tokens, or the comparison is none.
    counts = {row["counts"] for rows in found.values() for row in rows}
    assert len(counts) == 1, f"the sides made other tokens: {found}"
    speeds = {
        side: median(float(row["tokens_per_cpu_s"]) for row in rows) for side, rows in found.items()
    }
    for side, rows in found.items():
        # of this machine and this load alone: the ratio is what carries over
        ratio = speeds["ours"] / speeds[side]
        start = median(float(row["start_cpu_s"]) for row in rows)
        rate = median(float(row["mb_per_cpu_s"]) for row in rows)
        print(
            f"{side:16} {speeds[side]:12,.0f} tokens a CPU s  {rate:7.2f} MB a CPU s  ours / it {ratio:6.2f}"
            f"  start-up {start:5.2f} CPU s  engine {rows[0]['engine']}"
        )


def measure(side: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Run one side in this process and print its figures as JSON."""
    corpus, tokenizer = Path(arguments.corpus), Path(arguments.tokenizer)
    if arguments.megatron:
        sys.path.append(arguments.megatron)
    prepared: tuple[str, Work]
    if side in ("classic", "fast"):
        prepared = (classic if side == "classic" else fast)(corpus, tokenizer, folder)
    else:
        prepared = ours(corpus, tokenizer, folder, is_fast=side == "ours")
    engine, work = prepared
    # what the process did until here is imports and the tokenizer
    start_cpu_s = time.process_time()
    counts = work()
    cpu_s = time.process_time() - start_cpu_s
    row = {
        "side": side, "engine": engine, "tokens": int(counts.sum()), "cpu_s": cpu_s, "start_cpu_s": start_cpu_s,
        "tokens_per_cpu_s": int(counts.sum()) / cpu_s, "mb_per_cpu_s": corpus.stat().st_size / cpu_s / 1e6,
        "counts": sha256(counts.astype(np.int64).tobytes()).hexdigest()[:16],
    }  # fmt: skip
    print(json.dumps(row))


def ours(corpus: Path, tokenizer: Path, folder: Path, *, is_fast: bool) -> tuple[str, Work]:
    """Return the whole task of `data prepare`: reading, splitting, encoding, counting, shards with checksums."""
    from raymega.data.tokenizer_files import special_ids
    from raymega.prepare import shards
    from raymega.prepare.groups import make_groups
    from raymega.prepare.sources import list_files
    from raymega.prepare.tokenizer.encoder import EncodingRules, open_encoder

    files = {path.name: path.read_bytes() for path in tokenizer.iterdir()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    eod_id = special_ids(files).eos
    assert eod_id is not None, "every tokenizer of a dataset has an end"
    text, rules = files["tokenizer.json"].decode(), EncodingRules(eod_id=eod_id)
    encoder = open_encoder(text, rules, is_fast=is_fast)
    # the first call builds tables, which is start-up
    encoder.encode_batch(["warm"])
    engine = encoder.engine
    if not is_fast:
        # the task opens its own encoder, and would choose the fast one
        shards.open_encoder = lambda *_, **__: encoder
    groups = make_groups(list_files([str(corpus)], include=["*"], exclude=[]))

    def work() -> np.typing.NDArray[np.int64]:
        done = [
            shards.write_group(group, folder=folder, valid_fraction=0.0, rules=rules)
            for group in groups
        ]
        assert all(part.engine == engine and not part.faults for part in done), (
            "an engine fell back"
        )
        total: np.typing.NDArray[np.int64] = sum(part.parts["train"].counts for part in done)
        return total

    return f"{engine}, {len(groups)} groups", work


def classic(corpus: Path, tokenizer: Path, folder: Path) -> tuple[str, Work]:
    """Return the loop of Megatron's preprocess_data.py: a document a call, its end appended."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    # The faster of its two ways from text to ids; the files add no tokens of their own.
    loaded = HuggingFaceTokenizer(str(tokenizer), include_special_tokens=True)
    eod = loaded.tokenizer.eos_token_id
    dtype = np.uint16 if len(loaded.tokenizer) < 65500 else np.int32
    builder = IndexedDatasetBuilder(str(folder / "classic.bin"), dtype=dtype)

    def work() -> np.typing.NDArray[np.int64]:
        for text in _texts(corpus):
            ids = [*loaded.text_to_ids(text), eod]
            builder.add_document(ids, [len(ids)])  # it makes an array of the list
        builder.finalize(str(folder / "classic.idx"))
        return _counts(folder / "classic.bin", dtype, len(loaded.tokenizer))

    return "transformers", work


def fast(corpus: Path, tokenizer: Path, folder: Path) -> tuple[str, Work]:
    """Return the loop of Megatron's gigatoken script: a batch of documents a call, on one thread."""
    import gigatoken
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    definition = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    named = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    eod = next(t["id"] for t in definition["added_tokens"] if t["content"] == named["eos_token"])
    loaded = gigatoken.Tokenizer(str(tokenizer / "tokenizer.json"))
    dtype = np.uint16 if loaded.vocab_size < 65500 else np.int32
    builder = IndexedDatasetBuilder(str(folder / "fast.bin"), dtype=dtype)
    # one thread, as the other sides: tokens a CPU second are compared
    loaded.encode_batch(["warm"], parallel=False)

    def work() -> np.typing.NDArray[np.int64]:
        batch: list[str] = []
        for text in _texts(corpus):
            batch.append(text)
            if len(batch) == BATCH:
                write(batch)
                batch = []
        write(batch)
        builder.finalize(str(folder / "fast.idx"))
        return _counts(folder / "fast.bin", dtype, loaded.vocab_size)

    def write(batch: list[str]) -> None:
        for row in loaded.encode_batch(batch, parallel=False) if batch else ():
            ids = np.append(np.asarray(row), eod)
            builder.add_document(ids, [len(ids)])

    return "gigatoken", work


def _texts(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            if text := json.loads(line)["text"]:
                yield text


def _counts(path: Path, dtype: type, vocab_size: int) -> np.typing.NDArray[np.int64]:
    return np.bincount(np.fromfile(path, dtype=dtype), minlength=vocab_size)


if __name__ == "__main__":
    main()
