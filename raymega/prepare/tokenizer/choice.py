"""Decides what `--tokenizer` and its companions mean: the files, the end of a document, its begin.

It owns the rules for both. The formats of tokenizers are in the other modules of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from isal import isal_zlib
from tokenizers import Tokenizer

from raymega.config.hub import hub_name
from raymega.config.vision.sizes import NO_IMAGES, ImageSizes
from raymega.data.format import (
    END_OF_DOCUMENT,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ImageMeta,
    TokenizerMeta,
)
from raymega.data.images.files import MARK
from raymega.data.tokenizer_files import encode_settings, loading_settings
from raymega.errors import ConfigError, Fault
from raymega.prepare.chat.rows import CHATS, RowFormat
from raymega.prepare.chat.template import find_template
from raymega.prepare.images.rows import IMAGES_FORMAT, PATCH_TOKENS
from raymega.prepare.tokenizer.encoder import EncodingRules, load_tokenizer, vocab_size_of
from raymega.prepare.tokenizer.hugging_face import loadable, mark_special
from raymega.prepare.tokenizer.source_files import NAMED, SourceTokenizer, read_source
from raymega.prepare.tokenizer.trained import NUM_BYTES, byte_tokenizer, train_bpe

BYTES, BPE_PREFIX = "bytes", "bpe:"
BERT_BEGIN = "[CLS]"
"""Token that documents of BERT begin with; the settings of its published tokenizers name none."""
TRAINING_BYTES = 8 << 20
WITNESS_BYTES = 256 << 10
"""Size of the sample that a tokenizer is trained on, and of the one that a conversion is checked on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerOptions:
    """Options of a tokenizer.

    Attributes:
        name: Name or path: ``bytes``, ``bpe:N``, a file or a folder.
        eod_token: Text of the token that ends a document; empty for the tokenizer's own choice.
        add_bos: True to begin every document with the tokenizer's ``bos_token``.
        parse_special_tokens: True if special tokens that a document spells out become these tokens.
        row_format: Form of the rows; conversations need a chat template.
        chat_template: File of the chat template; empty for the tokenizer's own.
        images: Sizes of images; those of nothing for rows without.
    """

    name: str
    eod_token: str = ""
    add_bos: bool = False
    parse_special_tokens: bool = False
    row_format: RowFormat = "text"
    chat_template: str = ""
    images: ImageSizes = NO_IMAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetTokenizer:
    """Tokenizer of a dataset: its files by name, its description, and the rules of encoding."""

    files: Mapping[str, bytes]
    meta: TokenizerMeta
    vocab_size: int
    rules: EncodingRules

    @property
    def json(self) -> str:
        """Content of tokenizer.json."""
        return self.files[TOKENIZER_FILE].decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerChoice:
    """Checked options, and what was read for them.

    Attributes:
        options: Options that were checked.
        recipe: Entries of the dataset's recipe that the tokens depend on.
        sample_bytes: Size of the text that :func:`make_tokenizer` needs; 0 if it needs none.
        source: Tokenizer that was read; None for one that is made.
    """

    options: TokenizerOptions
    recipe: dict[str, str] = field(default_factory=dict)
    sample_bytes: int = 0
    source: SourceTokenizer | None = None

    @property
    def is_trained(self) -> bool:
        """True if the tokenizer is trained on the sample."""
        return self.options.name.startswith(BPE_PREFIX)


def choose_tokenizer(options: TokenizerOptions) -> TokenizerChoice:
    """Check the options of a tokenizer and read its files.

    Raises:
        ConfigError: There is no such tokenizer, its files are invalid, or it lacks a token that the
            options ask for.
    """
    name = options.name
    # In order: bytes or a legal bpe:N, an illegal bpe:N, a file or folder.
    if name == BYTES or _bpe_size(name) > NUM_BYTES:
        made = _finish(_made(_bytes_for(options)), options)
        sample_bytes = TRAINING_BYTES if name != BYTES else 0
        recipe = _recipe(name, options, made)
        return TokenizerChoice(options=options, recipe=recipe, sample_bytes=sample_bytes)
    if name.startswith(BPE_PREFIX):
        rule = f"bpe:N needs N of at least {NUM_BYTES + 1}: the bytes and {END_OF_DOCUMENT}"
        raise ConfigError(_fault(name, rule))
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(_absent(name))
    source = read_source(path)
    finished = _finish(source, options)
    # A changed file is another recipe.
    identity = f"file:{isal_zlib.crc32(source.identity):08x}"
    return TokenizerChoice(
        options=options, source=source, recipe=_recipe(identity, options, finished),
        sample_bytes=WITNESS_BYTES if source.witness else 0,
    )  # fmt: skip


def make_tokenizer(choice: TokenizerChoice, sample: Sequence[str]) -> DatasetTokenizer:
    """Return the dataset's tokenizer.

    Args:
        choice: Checked options.
        sample: Texts of the corpus, to train the tokenizer on or to check its conversion on.

    Raises:
        ConfigError: A conversion gives other ids than the library that the file was made for.
    """
    name, source = choice.options.name, choice.source
    if source is None:
        made = _bytes_for(choice.options) if name == BYTES else train_bpe(sample, _bpe_size(name))
        return _finish(_made(made), choice.options)
    finished = _finish(source, choice.options)
    if source.witness:
        tokenizer = load_tokenizer(finished.json, is_special_parsed=False)
        for text in sample:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if ids != source.witness(text):
                raise ConfigError(_other_ids(name, source.library, text))
    return finished


def _bytes_for(options: TokenizerOptions) -> str:
    """Return the tokenizer of bytes, with the mark of images for rows that have them."""
    return byte_tokenizer(*[MARK] * (options.row_format == IMAGES_FORMAT))


def _images_of(
    options: TokenizerOptions, vocabulary: Mapping[str, int]
) -> tuple[ImageMeta | None, str]:
    """Return the form of the images of rows that have them, and the token of a patch; None for other rows.

    Raises:
        ConfigError: The vocabulary lacks the token of their patches.
    """
    if options.row_format != IMAGES_FORMAT:
        return None, ""
    patch = next((token for token in PATCH_TOKENS if token in vocabulary), None)
    if patch is None:
        raise ConfigError(
            Fault(
                fact=f"--tokenizer {options.name} has no token {' or '.join(PATCH_TOKENS)}",
                rule="it stands for each patch of an image",
                remedy="give the folder of a LLaVA or Qwen2-VL model, or add one: AutoTokenizer's add_tokens([AddedToken("
                f"'{MARK}', special=True)]), then save_pretrained",
            )
        )
    sizes = options.images
    found = ImageMeta(
        size=sizes.image_size,
        num_patches=sizes.num_patches,
        token_id=vocabulary[patch],
        # what one size says by itself is left out, as older datasets have it
        patch_size=sizes.square if sizes.max_pixels else 0,
        min_pixels=sizes.min_pixels,
        max_pixels=sizes.max_pixels,
    )
    return found, patch


def _made(tokenizer_json: str) -> SourceTokenizer:
    settings = {"eos_token": END_OF_DOCUMENT}
    return SourceTokenizer(json=tokenizer_json, settings=settings, identity=b"")


def _finish(source: SourceTokenizer, options: TokenizerOptions) -> DatasetTokenizer:
    """Return the files and rules of ``source`` under the options.

    Raises:
        ConfigError: It is no tokenizer, or lacks a token that the options ask for.
    """
    name = options.name
    vocabulary = _parsed(source.json, name).get_vocab(with_added_tokens=True)
    eod = _end_of_document(source, vocabulary, options)
    bos = _begin_of_document(source, vocabulary) if options.add_bos else ""
    if options.add_bos and bos not in vocabulary:
        raise ConfigError(_no_bos(name, bos))
    # Tokens that the settings call special are special in the file too; then the rule for the begin.
    special = [str(source.settings[key]) for key in NAMED if source.settings.get(key)]
    special = [token for token in (eod, *special, bos) if token in vocabulary]
    text = mark_special(source.json, {token: vocabulary[token] for token in special})
    text = loadable(text, bos=bos)
    if not options.parse_special_tokens and _is_spelled(text, eod, vocabulary[eod]):
        raise ConfigError(_plain_end(name, eod))
    settings = loading_settings(source.settings, eod=eod, bos=bos)
    if options.row_format in CHATS:
        # the template writes the begin of a text, by the token that the model's own settings name
        settings["bos_token"] = bos or source.settings.get("bos_token")
    files = {
        **source.files,
        TOKENIZER_FILE: text.encode(),
        TOKENIZER_CONFIG_FILE: encode_settings(settings),
    }
    chat = None
    if options.row_format in CHATS:
        chat = find_template(files, path=options.chat_template, tokenizer=name)
        own = str(source.settings.get("eos_token") or eod)
        if own != eod and "eos_token" in chat.source:
            raise ConfigError(_two_ends(eod, own))
        # So that an export of the run is asked in the words that it was trained with.
        files |= {TEMPLATE_FILE: chat.source.encode()} if options.chat_template else {}
    bos_id = vocabulary[bos] if bos else -1
    images, patch = _images_of(options, vocabulary)
    is_parsed = options.parse_special_tokens
    return DatasetTokenizer(
        files=files,
        vocab_size=vocab_size_of(Tokenizer.from_str(text)),
        meta=TokenizerMeta(
            files=tuple(sorted(files)), eod_token=eod, bos_id=bos_id, is_special_parsed=is_parsed
        ),
        rules=EncodingRules(
            eod_id=vocabulary[eod],
            bos_id=bos_id,
            is_special_parsed=is_parsed,
            chat=chat,
            images=images,
            patch_token=patch,
        ),
    )


def _begin_of_document(source: SourceTokenizer, vocabulary: Mapping[str, int]) -> str:
    """Return the ``bos_token`` of the settings, else their ``cls_token``, else BERT's; empty for none."""
    named = source.settings.get("bos_token") or source.settings.get("cls_token")
    return str(named or (BERT_BEGIN if BERT_BEGIN in vocabulary else ""))


def _end_of_document(
    source: SourceTokenizer, vocabulary: Mapping[str, int], options: TokenizerOptions
) -> str:
    """Return the token that ends documents.

    It is `--eod-token`, else the ``eos_token`` of the settings, else END_OF_DOCUMENT.

    Raises:
        ConfigError: The vocabulary has no such token.
    """
    named = str(source.settings.get("eos_token") or "")
    eod = options.eod_token or named or END_OF_DOCUMENT
    if eod in vocabulary:
        return eod
    added = json.loads(source.json).get("added_tokens") or []
    special = [token["content"] for token in added if token["special"]]
    raise ConfigError(
        _no_end(options.name, eod, special, is_named=bool(options.eod_token or named))
    )


def _parsed(tokenizer_json: str, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(_fault(name, f"it must be a `tokenizers` JSON file ({error})")) from error


def _is_spelled(tokenizer_json: str, eod: str, eod_id: int) -> bool:
    """Return True if the text of the end-of-document token is encoded as this token."""
    tokenizer = load_tokenizer(tokenizer_json, is_special_parsed=False)
    texts = (eod, f"a {eod} b", f"a{eod}b")
    return any(eod_id in tokenizer.encode(text, add_special_tokens=False).ids for text in texts)


def _recipe(identity: str, options: TokenizerOptions, made: DatasetTokenizer) -> dict[str, str]:
    """Return the entries of the recipe; a default has none, so that older datasets are found."""
    recipe, meta = {"tokenizer": identity}, made.meta
    if options.row_format != "text":
        recipe["row_format"] = options.row_format
    if made.rules.chat:
        recipe["chat_template"] = f"{isal_zlib.crc32(repr(made.rules.chat).encode()):08x}"
    if made.rules.images:
        sizes = options.images
        area = f"{sizes.min_pixels}-{sizes.max_pixels}"
        recipe["images"] = f"{sizes.image_size or area}/{sizes.square}"
    if meta.eod_token != END_OF_DOCUMENT:
        recipe["eod_token"] = meta.eod_token
    if options.add_bos:
        recipe["bos_id"] = str(meta.bos_id)
    if options.parse_special_tokens:
        recipe["special_tokens"] = "parsed"
    return recipe


def _bpe_size(name: str) -> int:
    digits = name.removeprefix(BPE_PREFIX)
    return int(digits) if name.startswith(BPE_PREFIX) and digits.isdecimal() else 0


def _fault(name: str, rule: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {name}", rule=rule, remedy="use bytes, bpe:2048 or a tokenizer.json"
    )


def _absent(name: str) -> Fault:
    """Return the fault of a file or folder that does not exist, which may be a name of the Hub."""
    fault = _fault(name, "it must be `bytes`, `bpe:N` or an existing file or folder")
    if "/" in name and not hub_name(name):
        return fault
    if Path(name).suffix:
        return fault
    folder = name.rpartition("/")[2]
    fetch = f"hf download {name} tokenizer.json tokenizer_config.json --local-dir {folder}"
    return replace(fault, remedy=f"use bytes, bpe:2048, or of the Hub: `{fetch}`, then "
                   f"--tokenizer {folder}")  # fmt: skip


def _no_end(name: str, eod: str, special: Sequence[str], *, is_named: bool) -> Fault:
    told = f"{eod!r} is not in its vocabulary" if is_named else "no settings name its eos_token"
    known = ", ".join(map(repr, special[:8])) or "none"
    choice = special[0] if special else "TOKEN"
    return Fault(
        fact=f"--tokenizer {name} has no end of document: {told}",
        rule=f"a token ends every document; special tokens of this one: {known}",
        remedy=f"add a tokenizer_config.json with an eos_token, or --eod-token '{choice}'",
    )


def _no_bos(name: str, bos: str) -> Fault:
    told = (
        f"bos_token {bos!r} is not in its vocabulary" if bos else "its settings name no bos_token"
    )
    return Fault(
        fact=f"--add-bos with --tokenizer {name}: {told}",
        rule="documents begin with the bos_token of tokenizer_config.json",
        remedy="leave out --add-bos, or give a folder whose tokenizer_config.json names it",
    )


def _two_ends(eod: str, own: str) -> Fault:
    return Fault(
        fact=f"--eod-token {eod!r} with a chat template that writes eos_token, which is {own!r}",
        rule="the tokenizer of a dataset has one eos_token, the end of a document: turns would end by it, too",
        remedy="leave --eod-token out, or give a --chat-template that spells the end of a turn",
    )


def _plain_end(name: str, eod: str) -> Fault:
    return Fault(
        fact=f"--eod-token {eod!r} of --tokenizer {name} is what its own text is encoded as",
        rule="a document must not be able to spell its end",
        remedy="name a special token",
    )


def _other_ids(name: str, library: str, text: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {name}: the conversion gives other ids than {library} for a document "
        f"that begins with {text[:40]!r}",
        rule="a converted tokenizer must give the ids of the original one",
        remedy="use the model's tokenizer.json",
    )
