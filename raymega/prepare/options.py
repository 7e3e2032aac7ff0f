"""Options of a preparation, and everything that is checked before it starts.

It owns the recipe, which determines the dataset. The work itself is in `raymega.prepare.pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from raymega.config.vision.sizes import NO_IMAGES, ImageSizes
from raymega.data.format import local_folder
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, Fault, first_few
from raymega.prepare.chat.rows import CHATS, RowFormat
from raymega.prepare.images.rows import IMAGES_FORMAT
from raymega.prepare.output import FolderOutput
from raymega.prepare.readers.pieces import SourceFile
from raymega.prepare.remote_output import StoreOutput
from raymega.prepare.sources import files_digest, list_files
from raymega.prepare.tokenizer.choice import (
    BPE_PREFIX,
    TokenizerChoice,
    TokenizerOptions,
    choose_tokenizer,
)

Output = FolderOutput | StoreOutput
ROW_FORMATS = ("lines", "json", "parquet", "arrow")
"""Formats of files whose rows have keys or columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of a preparation.

    Attributes:
        inputs: Files, folders or URIs with text.
        out: Folder of the dataset, which all nodes must share; or a URI in an object store.
        tokenizer: Tokenizer: ``bytes``, ``bpe:N``, or the path of a file or folder.
        valid_fraction: Share of documents held out, from 0 to below 1, chosen by a hash of their
            text.
        include: Patterns of files to read; a file must match at least one.
        exclude: Patterns of files to leave out; a file must match none.
        text_key: Key of JSON objects or column of tables that holds the text.
        max_bad_lines: Number of lines, rows or text files without a document that are left out;
            one more refuses the corpus.
        address: Address of the Ray cluster; see `raymega.session.session_at`.
        eod_token: Text of the token that ends a document; empty for the tokenizer's own choice.
        add_bos: True to begin every document with the tokenizer's ``bos_token``.
        parse_special_tokens: True if special tokens that a document spells out become these tokens.
        row_format: Form of a row: a text, a conversation, or a chosen and a rejected one.
        chat_template: File with the template of conversations; empty for the tokenizer's own.
        images: Rule by which images are resized; that of nothing without images.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: str
    valid_fraction: float = 0.02
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    max_bad_lines: int = 0
    address: str = "auto"
    eod_token: str = ""
    add_bos: bool = False
    parse_special_tokens: bool = False
    row_format: RowFormat = "text"
    chat_template: str = ""
    images: ImageSizes = NO_IMAGES

    @property
    def tokenizer_options(self) -> TokenizerOptions:
        """Options of the tokenizer alone."""
        return TokenizerOptions(
            name=self.tokenizer, eod_token=self.eod_token, add_bos=self.add_bos,
            parse_special_tokens=self.parse_special_tokens, row_format=self.row_format,
            chat_template=self.chat_template, images=self.images,
        )  # fmt: skip


def output_at(out: str) -> Output:
    """Return the output at ``--out``; nothing is accessed yet."""
    if is_remote(out):
        return StoreOutput(uri=out)
    return FolderOutput(folder=local_folder(out).absolute())


def plan_work(
    options: PrepareOptions, output: Output
) -> tuple[TokenizerChoice, dict[str, str], list[SourceFile]]:
    """Return the tokenizer, the recipe, which determines the dataset, and the files to read.

    Raises:
        ConfigError: With one fault for each invalid option, input or output.
    """
    # Collect the faults of options, tokenizer, inputs and output before raising any.
    faults: list[Fault | str] = [*_option_faults(options)]
    tokenizer = _or_faults(faults, partial(choose_tokenizer, options.tokenizer_options))
    include, exclude = options.include, options.exclude
    files = _or_faults(
        faults, partial(list_files, options.inputs, include=include, exclude=exclude)
    )
    if files is not None and not any(file.num_bytes for file in files):
        faults.append(no_text(options.inputs))
    if options.row_format != "text":
        unread = [file.label for file in files or [] if file.form.format not in ROW_FORMATS]
        faults += [_no_rows(unread, options.row_format)] if unread else []
    if isinstance(output, FolderOutput):
        faults += folder_faults(output.folder, files or [])
    if faults:
        raise ConfigError(*faults)
    assert tokenizer is not None and files is not None, "what is missing was a fault"
    # Everything that the bytes of the shards depend on.
    recipe = {
        "inputs": files_digest(files),
        **tokenizer.recipe,
        "valid_fraction": repr(options.valid_fraction),
        "text_key": options.text_key,
    }
    return tokenizer, recipe, files


Made = TypeVar("Made")


def _or_faults(faults: list[Fault | str], make: Callable[[], Made]) -> Made | None:
    """Return the result of ``make``; on a ConfigError add its faults to ``faults``, return None."""
    try:
        return make()
    except ConfigError as error:
        faults += error.faults
        return None


def folder_faults(folder: Path, files: Sequence[SourceFile]) -> list[Fault]:
    """Return the fault of an output folder that holds inputs or is a file."""
    if any(Path(file.path).is_relative_to(folder) for file in files):
        return [_output_in_input(folder)]
    return [_output_is_a_file(folder)] if folder.exists() and not folder.is_dir() else []


def _option_faults(options: PrepareOptions) -> Iterator[Fault]:
    if not 0 <= options.valid_fraction < 1:
        yield Fault(
            fact=f"--valid-fraction {options.valid_fraction}",
            rule="it must be at least 0 and below 1",
            remedy="use 0.02",
        )
    if options.max_bad_lines < 0:
        yield Fault(
            fact=f"--max-bad-lines {options.max_bad_lines}",
            rule="it must be at least 0",
            remedy="use 0",
        )
    if options.row_format != "text" and options.tokenizer.startswith(BPE_PREFIX):
        yield Fault(
            fact=f"--format {options.row_format} with --tokenizer {options.tokenizer}",
            rule="these rows are tokenized as the model is that they tune, by its own tokenizer",
            remedy="give the folder of that model as --tokenizer",
        )
    if options.chat_template and options.row_format not in CHATS:
        yield Fault(
            fact=f"--chat-template {options.chat_template} with --format {options.row_format}",
            rule="only conversations are rendered",
            remedy="add --format chat, or leave it out",
        )
    yield from _image_faults(options)
    if not options.text_key:
        yield Fault(
            fact="--text-key is empty",
            rule="it must be a key of JSON objects or a column of tables",
            remedy="use text",
        )


def _image_faults(options: PrepareOptions) -> Iterator[Fault]:
    patch, size, least, most = options.images
    fact = f"--image-size {size} and --patch-size {patch}"
    if most or least:
        fact = f"--image-size {size}, --patch-size {patch}, --min-pixels {least} and --max-pixels {most}"
    if options.row_format != IMAGES_FORMAT:
        if any(options.images):
            yield Fault(
                fact=f"{fact} with --format {options.row_format}",
                rule="these rows have no images",
                remedy=f"add --format {IMAGES_FORMAT}, or leave them out",
            )
    elif most or least:
        if size or patch < 1 or not 0 <= least <= most or most < patch**2:
            yield Fault(
                fact=fact,
                rule="an image keeps about its shape, in whole patches and with an area from one number to the other, which "
                "has room for a patch; or all are resized to one square",
                remedy="use those of the model: --max-pixels 1003520 --min-pixels 3136 --patch-size 28 for Qwen2-VL, which "
                "merges 2 x 2 patches of 14",
            )
    elif size < 1 or patch < 1 or size % patch:
        yield Fault(
            fact=fact,
            rule="an image is resized to a square of whole patches, as the model's vision tower reads it",
            remedy="use those of the model: --image-size 336 --patch-size 14 for LLaVA 1.5, and "
            "--image-size 448 --patch-size 28 for Qwen2-VL, which merges 2 x 2 patches of 14",
        )


def _no_rows(files: Sequence[str], row_format: RowFormat) -> Fault:
    return Fault(
        fact=f"{first_few(files)} with --format {row_format}",
        rule=f"such rows are read of {', '.join(ROW_FORMATS)}",
        remedy="name the files with rows by --include '*.jsonl'",
    )


def no_text(inputs: Sequence[str]) -> Fault:
    """Return the fault of inputs whose files are all empty."""
    return Fault(
        fact=f"the files of {', '.join(inputs)} are all empty",
        rule="a dataset needs text",
        remedy="give files with text in them",
    )


def _output_is_a_file(folder: Path) -> Fault:
    return Fault(
        fact=f"--out {folder} is a file",
        rule="a dataset is a folder",
        remedy="give another path, or remove the file",
    )


def _output_in_input(folder: Path) -> Fault:
    return Fault(
        fact=f"--out {folder} holds files that an INPUT selects",
        rule="a dataset must not become its own source",
        remedy="give an --out outside of every INPUT, or leave it out with --exclude",
    )
