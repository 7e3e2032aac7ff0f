"""Command `raymega data`: options and output of preparation, inspection and export of datasets."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from raymega.cli.data.curate import curate, train_quality
from raymega.cli.data.stored import reference, teacher
from raymega.cli.options import Address, AsJson, add_command
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars
from raymega.config.vision.sizes import ImageSizes
from raymega.data.export import export_megatron
from raymega.data.format import DatasetMeta, RowFormat
from raymega.data.inspect import describe, describe_blocks, describe_packing, inspect_dataset
from raymega.data.open_split import Shape
from raymega.errors import counted
from raymega.prepare.origins import trace

if TYPE_CHECKING:
    from raymega.prepare.pipeline import Prepared
    from raymega.prepare.show import ShownDocument

data_app = typer.Typer(
    help="Curate, prepare, inspect and export datasets.\n\nExample: raymega data inspect corpus-tokens",
    no_args_is_help=True,
)


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...")],
    out: str,
    tokenizer: str,
    valid_fraction: float = 0.02,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    eod_token: str = "",
    add_bos: bool = False,
    parse_special_tokens: bool = False,
    format: RowFormat = "text",  # the option's name
    chat_template: str = "",
    image_size: int = 0,
    patch_size: int = 0,
    min_pixels: int = 0,
    max_pixels: int = 0,
    text_key: str | None = None,
    max_bad_lines: int = 0,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokenize text into shards with a Ray Data pipeline.

    A document is a text file, a line of .jsonl, an object of .json, a row of .parquet, .arrow or a
    folder of Hugging Face datasets, a page of .html or .warc; each also as .gz, .zst or .bz2. The
    same command again continues what was interrupted, or finds the finished dataset. With --format chat a row
    is a conversation: {"messages": [{"role": "user", "content": "..."}, ...]}.

    Options:
        inputs: Input files, folders or URIs.
        out: Output folder that all nodes share, or s3://bucket/prefix.
        tokenizer: bytes, bpe:N (trained on the corpus), or a file or folder: tokenizer.json, sentencepiece .model, .tiktoken.
        valid_fraction: Share of documents held out for validation, chosen by a hash of their text; 0 is none.
        include: Read only files that match, such as '*.py'; repeatable.
        exclude: Skip files that match, such as test/; repeatable.
        eod_token: Token that ends each document; default: the eos_token of tokenizer_config.json.
        add_bos: Begin each document with the tokenizer's bos_token.
        parse_special_tokens: Encode special tokens that documents spell out as these tokens, not as text.
        format: Form of a row: text, chat (messages, of which the assistant's are learned), preference (chosen and
            rejected), kto (prompt, completion, label), classification (text, label), regression (text, label), token_classification (tokens, tags), multiple_choice (context, question, choices, label), embedding (anchor, positive) or images (text, images, prompt).
        chat_template: File with a jinja template of conversations; default: the tokenizer's own.
        image_size: images only: height and width to which all images are resized, in pixels.
        patch_size: images only: height and width of the square of an image that is a token: a patch, or patches that are merged.
        min_pixels: images only: least area of an image, with --max-pixels.
        max_pixels: images only: largest area of an image, in place of --image-size: each keeps about its shape (Qwen2-VL's smart_resize).
        text_key: Key of JSON objects or column of tables that holds the text; default: that of the format.
        max_bad_lines: Number of lines, rows or texts that are no document and may be left out.

    Example: raymega data prepare corpus/ --out corpus-tokens --tokenizer bpe:2048 --include '*.py'
    """
    # Imported here: Ray Data is slow to import, and the other commands do without it.
    from raymega.prepare.chat.rows import DEFAULT_KEYS
    from raymega.prepare.options import PrepareOptions
    from raymega.prepare.pipeline import prepare as run_prepare

    options = PrepareOptions(
        inputs=tuple(inputs),
        out=out,
        tokenizer=tokenizer,
        valid_fraction=valid_fraction,
        include=tuple(include or ["*"]),
        exclude=tuple(exclude or []),
        text_key=DEFAULT_KEYS[format] if text_key is None else text_key,
        row_format=format,
        chat_template=chat_template,
        images=ImageSizes(patch_size, image_size, min_pixels, max_pixels),
        max_bad_lines=max_bad_lines,
        address=address,
        eod_token=eod_token,
        add_bos=add_bos,
        parse_special_tokens=parse_special_tokens,
    )
    with phase_bars() as on_progress:
        done = run_prepare(options, on_progress=on_progress)
    _show(done.meta, _outcome(done), packing={}, as_json=as_json)


def _outcome(done: Prepared) -> dict[str, object]:
    """Return what is told of a preparation beside its dataset."""
    return {
        "output": done.uri,
        "seconds": done.seconds,
        "ray_start_seconds": done.ray_start_seconds,
        "engine": ", ".join(
            f"{name} ({counted(count, 'group')})" for name, count in done.engines.items()
        )
        or "none",
        "is_cached": done.is_cached,
    }


def inspect(
    uri: Annotated[str, typer.Argument()],
    verify: bool = False,
    seq_len: Annotated[int, typer.Option(min=0)] = 0,
    packing_window: Annotated[int, typer.Option(min=1)] = 4096,
    token: Annotated[int, typer.Option(min=-1)] = -1,
    split: str = "train",
    block_bytes: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Show splits and sizes of a dataset; with --verify, check every byte of it.

    With --seq-len, also the rows that data.packing=best_fit makes of its documents. With --token,
    where that token came from.

    Options:
        uri: Folder or URI of the dataset.
        verify: Read every byte and compare checksums.
        seq_len: Tokens per row: pack documents and report the efficiency; 0 does not pack.
        packing_window: Number of documents that are packed together.
        token: Number of a token in its split; prints its file and row. -1 is none.
        split: Split of --token and --block-bytes.
        block_bytes: Value of data.shuffle_block_bytes: the split's blocks, and the disk that a node
            needs for them. 0 is none.

    Example: raymega data inspect corpus-tokens --verify --seq-len 8192
    """
    with phase_bars() as on_progress:
        meta = inspect_dataset(
            uri,
            is_verified=verify,
            on_shard=lambda done, total: on_progress("verifying", done, total),
        )
    shape = Shape(seq_len=seq_len, packing="best_fit", window=packing_window)
    packing = describe_packing(uri, meta, shape) if seq_len else {}
    result: dict[str, object] = {"output": uri, "is_verified": verify}
    if block_bytes:
        result |= describe_blocks(meta, split, block_bytes)
    if token >= 0:
        result |= {"token": token, **asdict(trace(uri, meta, split=split, token=token))}
    _show(meta, result, packing=packing, as_json=as_json)


def export(
    uri: Annotated[str, typer.Argument()],
    out: str,
    format: Literal["megatron"] = "megatron",  # the option's name
    split: str = "train",
    as_json: AsJson = False,
) -> None:
    """Write a split of a dataset in another tool's format: Megatron's PREFIX.bin and PREFIX.idx.

    The files are byte for byte those of Megatron's tools/preprocess_data.py --append-eod.

    Options:
        uri: Folder or URI of the dataset.
        out: Path of the two files, without .bin and .idx.
        format: Format of the files.
        split: Split to write, train or valid.

    Example: raymega data export corpus-tokens --format megatron --out corpus
    """
    with phase_bars() as on_progress:
        written = export_megatron(
            uri,
            out,
            split=split,
            on_progress=lambda done, total: on_progress("writing", done, total),
        )
    result = {"output": f"{out}.bin, {out}.idx", "format": format, "split": split} | written
    if as_json:
        print_json(result)
        return
    for key, value in result.items():
        print(f"{key.replace('_', ' ')}: {_text(value)}")


def show(
    uri: Annotated[str, typer.Argument()],
    documents: Annotated[int, typer.Option(min=1)] = 3,
    first: Annotated[int, typer.Option(min=0)] = 0,
    split: str = "train",
    loss_on: Literal["auto", "assistant", "completion", "all"] = "auto",
    as_json: AsJson = False,
) -> None:
    """Show documents of a dataset token by token, with what counts in the loss and where they came from.

    On a terminal, shades tell the tokens apart and green ones count; elsewhere | separates tokens and what counts
    stands in brackets.

    Options:
        uri: Folder or URI of the dataset.
        documents: Number of documents.
        first: Number of the first document.
        split: Split to show, train or valid.
        loss_on: Labels that count, as data.loss_on.

    Example: raymega data show corpus-tokens --documents 2
    """
    from raymega.prepare.show import show_documents

    meta = inspect_dataset(uri, is_verified=False, on_shard=lambda *_: None)
    found = show_documents(uri, meta, split=split, first=first, count=documents, loss_on=loss_on)
    console = Console(highlight=False, soft_wrap=True)
    for document in found:
        if as_json:
            print_json(document)
            continue
        counted = sum(token.counts for token in document.tokens)
        print(
            f"document {document.number}: {document.file}, row {document.row}; "
            f"{len(document.tokens)} tokens, {counted} count",
            flush=True,
        )
        console.print(
            _in_colour(document) if console.is_terminal else _in_brackets(document), markup=False
        )


add_command(data_app, curate)
add_command(data_app, train_quality, "train-quality")
add_command(data_app, prepare)
add_command(data_app, inspect)
add_command(data_app, show)
add_command(data_app, reference)
add_command(data_app, teacher)
add_command(data_app, export)


def _in_colour(document: ShownDocument) -> Text:
    text = Text()
    for number, token in enumerate(document.tokens):
        shade = "on grey15" if number % 2 else "on grey27"
        text.append(token.text, style=f"{'bold green' if token.counts else 'grey85'} {shade}")
    return text


def _in_brackets(document: ShownDocument) -> str:
    runs = groupby(document.tokens, key=lambda token: token.counts)
    parts = ((counts, "|".join(token.text for token in tokens)) for counts, tokens in runs)
    return "|".join(f"[[{text}]]" if counts else text for counts, text in parts)


def _show(
    meta: DatasetMeta,
    result: dict[str, object],
    *,
    packing: dict[str, dict[str, float]],
    as_json: bool,
) -> None:
    description = describe(meta)
    if as_json:
        result |= {"packing": packing} if packing else {}
        print_json(result | description)
        return
    # tables of the splits, then the other facts as key: value
    splits = description.pop("splits")
    headers = ("split", "documents", "text bytes", "tokens", "shards", "bytes per token")
    print(table(headers, [(name, *split.values()) for name, split in splits.items()]))
    if packing:
        names = next(iter(packing.values()))
        columns = ("split", *(name.replace("_", " ") for name in names))
        print(table(columns, [(name, *found.values()) for name, found in packing.items()]))
    for key, value in {**description, **result}.items():
        print(f"{key.replace('_', ' ')}: {_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
