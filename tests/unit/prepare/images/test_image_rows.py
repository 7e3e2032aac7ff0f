"""Datasets of rows with images: from files to the rows of a run, and what is refused."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raymega.config.vision.section import VisionSection
from raymega.config.vision.sizes import ImageSizes
from raymega.data import arrow
from raymega.data.arrow import FolderFiles, TokenStream
from raymega.data.checks import training_faults
from raymega.data.format import ImageMeta
from raymega.data.images.files import BrokenImageError
from raymega.data.images.stored import StoredImages
from raymega.data.open_split import Shape, open_split
from raymega.data.rows import TEXT
from raymega.data.samples import open_samples
from raymega.errors import ConfigError, DataError
from raymega.prepare import assembly
from raymega.prepare.images import documents
from raymega.prepare.images.documents import image_document
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.jobs import make_test_plan

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")

SIZE, PATCH, PATCHES = 8, 4, 4
EOD, TOKEN = 256, 257


def _picture(seed, kind="PNG"):
    """An image's file of some shape, by its number."""
    random, stream = np.random.default_rng(seed), io.BytesIO()
    pixels = random.integers(0, 256, (6 + seed % 5, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def _resized(raw):
    whole = Image.open(io.BytesIO(raw)).convert("RGB")
    return np.asarray(whole.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def _table_row(number):
    count = number % 4
    text = f"t{number}" + "<image>." * count
    images = [{"bytes": _picture(4 * number + at), "path": None} for at in range(count)]
    return {"text": text, "images": images, "prompt": "say " if number % 2 else None}


ROWS = [_table_row(number) for number in range(12)]


def _prepare(folder, rows=ROWS, *, lines=(), **options):
    (folder / "in").mkdir(parents=True)
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), folder / "in" / "a.parquet")
    if lines:
        (folder / "in" / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    given = {"row_format": "images", "images": ImageSizes(PATCH, SIZE)} | options
    return prepare(
        PrepareOptions(
            inputs=(str(folder / "in"),), out=str(folder / "out"), valid_fraction=0, **{"tokenizer": "bytes", **given}
        ),
        on_progress=lambda *_: None,
    ).meta  # fmt: skip


def _wanted(row):
    """Tokens and labels that count of a row's document, and its pixels."""
    ids, is_label = [], []
    for part, counts in (((row["prompt"] or ""), False), (row["text"], True)):
        for at, piece in enumerate(part.split("<image>")):
            ids += [TOKEN] * (PATCHES * bool(at)) + list(piece.encode())
            is_label += [False] * (PATCHES * bool(at)) + [counts] * len(piece)
    return [*ids, EOD], [*is_label, True], [_resized(image["bytes"]) for image in row["images"]]


@pytest.mark.parametrize("seq_len", [32, 64])
def test_packed_rows_have_each_document_with_its_images(tmp_path, seq_len):
    meta = _prepare(tmp_path)
    assert (meta.images.size, meta.images.num_patches, meta.images.token_id) == (8, 4, TOKEN)
    shape = Shape(seq_len=seq_len, packing="best_fit", window=4, multiple=4)
    source = open_split(str(tmp_path / "out"), "train", shape, seed=0)
    wanted, seen = {tuple(_wanted(row)[0]): _wanted(row) for row in ROWS}, 0
    for index in range(source.num_windows):
        row, at, images = source.row(index), 0, iter(source.row(index).images)
        assert ((row.tokens == TOKEN) == (row.image_places != TEXT)).all()
        found = row.image_places[row.image_places != TEXT]
        assert found.tolist() == list(range(PATCHES * len(row.images)))
        for held in source.held(index):
            _, counts, pixels = wanted[tuple(row.tokens[at : at + held.length].tolist())]
            assert row.mask[at : at + held.length].tolist() == [*counts[1:], False]
            for each in pixels:
                assert (next(images)() == each).all()
            at, seen = at + held.padded, seen + 1
        assert next(images, None) is None
    assert seen == len(ROWS)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("data.packing=best_fit", "data.document_multiple=2"),
        ("data.packing=best_fit", "data.augment={horizontal_flip: 0.5}"),
    ],
    ids=["windows", "packed", "augmented"],
)
def test_images_of_a_row_are_found_without_its_tokens(tmp_path, monkeypatch, options):
    _prepare(tmp_path)
    vision = f"{{kind: clip, image_size: {SIZE}, patch_size: 4, num_layers: 2, hidden_size: 8, num_heads: 2, ffn_hidden_size: 8, image_token_id: {TOKEN}}}"
    path = f"data.path={tmp_path / 'out'}"
    sizes = ("model.vocab_size=512", "data.seq_len=16", "model.max_positions=16")
    samples = open_samples(make_test_plan(path, f"model.vision={vision}", *sizes, *options).job)
    count = samples.num_samples
    wanted = [[image().tobytes() for image in samples.row(n).images] for n in range(count)]
    assert sum(map(len, wanted)) > 10
    monkeypatch.setattr(TokenStream, "read", None)
    assert [[image().tobytes() for image in samples.images(n)] for n in range(count)] == wanted


def test_pixels_are_looked_at_by_the_rank_that_reads_them_alone(tmp_path):
    meta = _prepare(tmp_path)
    files = FolderFiles(tmp_path / "out")
    stream = TokenStream(files, meta.splits["train"])
    found = stream.read_images(0, stream.num_tokens)
    (shard,) = stream.shards
    mapped = [chunk.buffers()[2] for chunk in files.table(shard)["images"].chunks]
    places = [range(each.address, each.address + each.size) for each in mapped]
    # views of the mapped shard, not copies: a page is read when its pixels are
    assert len(found) > 10
    assert all(any(pa.py_buffer(raw).address in place for place in places) for _, raw in found)


def test_shards_with_pixels_are_no_larger_than_others_and_are_read_alone(tmp_path, monkeypatch):
    # a token of a patch is 1 + 3 * 64 / (4 * 4) of text
    monkeypatch.setattr(assembly, "SHARD_TOKENS", 13 * 30)
    split, opened = _prepare(tmp_path).splits["train"], []
    assert len(split.shards) > 3, "152 tokens, of which 30 are as large as 390 of text"

    class Files(FolderFiles):
        def table(self, shard):
            opened.append(shard.file)
            return super().table(shard)

    meta = ImageMeta(size=SIZE, num_patches=PATCHES, token_id=TOKEN)
    stream = TokenStream(Files(tmp_path / "out"), split)
    images, begin = StoredImages(stream.read_images, meta), 0
    for shard in split.shards:
        opened.clear()
        assert images.held(begin, begin + 2).places.shape == (2,)
        assert opened == [shard.file], "a streamed shard before it may be gone"
        begin += shard.num_tokens


def test_json_holds_images_as_base64_and_broken_ones_are_named(tmp_path):
    good = base64.b64encode(_picture(1, "JPEG")).decode()
    rows = {
        "is whole": {"text": "a <image>", "images": [good]},
        "image 1 is broken": {"text": "<image><image>", "images": [good, good[:80]]},
        "image 0 is no base64": {"text": "<image>", "images": ["%%"]},
        "it has 1 images and 2 marks": {"text": "<image><image>", "images": [good]},
        "image 0 is a int": {"text": "<image>", "images": [7]},
        "its 'prompt' is a int": {"text": "a", "images": [], "prompt": 3},
    }
    with pytest.raises(ConfigError, match=r"b\.jsonl@\d+ has no document \(image 1 is broken"):
        _prepare(tmp_path / "strict", [], lines=list(rows.values()))
    meta = _prepare(tmp_path / "lax", [], lines=list(rows.values()), max_bad_lines=5)
    assert (meta.source.num_bad_lines, meta.splits["train"].num_documents) == (5, 1)


def test_a_row_with_more_pixels_than_arrow_counts_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_IMAGE_BYTES", 3 * SIZE**2)
    good = base64.b64encode(_picture(1, "JPEG")).decode()
    rows = [
        {"text": "a <image>", "images": [good]},
        {"text": "<image><image>", "images": [good] * 2},
    ]
    told = (
        r"b\.jsonl@\d+ has no document \(its 2 images are 384 bytes of pixels, and a row holds 192"
    )
    with pytest.raises(ConfigError, match=told):
        _prepare(tmp_path, [], lines=rows)
    monkeypatch.setattr(arrow, "MOST_IMAGE_BYTES", 191)
    writer = arrow.ShardWriter(tmp_path, "a.arrow", dtype="uint16", has_images=True)
    with pytest.raises(DataError, match="a document has 192 bytes of images"), writer:
        writer.append(np.zeros(4, np.uint16), None, [(0, bytes(192))])


def test_any_failure_of_a_parser_is_a_broken_image():
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(stream, "DDS")
    raw = bytearray(stream.getvalue())
    raw[80:84] = bytes(4)  # flags of a pixel format that is none: Pillow raises NotImplementedError
    text = json.dumps({"text": "<image>", "prompt": "", "images": [base64.b64encode(raw).decode()]})
    meta = ImageMeta(size=8, num_patches=4, token_id=9)
    with pytest.raises(BrokenImageError, match="image 0 is broken: Unknown pixel format"):
        image_document(text, lambda part: np.array([9] * bool(part)), meta, bos_id=-1, eod_id=2)


def test_marks_become_the_token_of_the_tokenizer_that_is_given(tmp_path):
    pad = "<|image_pad|>"
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer(pad))
    rows = [{"text": "a<image>b", "images": [_picture(1)]}] * 3
    meta = _prepare(tmp_path / "whole", rows, tokenizer=str(tmp_path / "tokenizer.json"))
    stream = TokenStream(tmp_path / "whole" / "out", meta.splits["train"])
    assert meta.images.token_id == TOKEN
    assert stream.read(0, 7).tolist() == [ord("a"), *[TOKEN] * PATCHES, ord("b"), EOD]


def test_pixels_of_another_number_are_a_damaged_shard():
    meta = ImageMeta(size=8, num_patches=4, token_id=9)
    (image,) = StoredImages(lambda *_: [(2, bytes(191))], meta).held(0, 8).images
    with pytest.raises(DataError, match="an image of a shard has 191 bytes"):
        image()


def test_a_grey_or_turned_picture_is_upright_in_rgb():
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    plain = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    plain.save(stream, "PNG", exif=exif)
    coded = base64.b64encode(stream.getvalue()).decode()
    text = json.dumps({"text": "<image>", "prompt": "", "images": [coded]})
    meta = ImageMeta(size=8, num_patches=4, token_id=9)
    found = image_document(
        text, lambda part: np.array([9] * bool(part), dtype=np.uint32), meta, bos_id=1, eod_id=2
    )
    assert found.ids.tolist() == [1, 9, 9, 9, 9, 2]
    ((place, raw),) = found.images
    turned = np.rot90(np.asarray(plain), -1)
    assert place == 1
    assert (np.frombuffer(raw, np.uint8).reshape(3, 8, 8) == turned).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"images": ImageSizes(PATCH, 0)}, "--image-size 0"),
        ({"images": ImageSizes(3, SIZE)}, "whole patches"),
        ({"row_format": "text"}, "these rows have no images"),
    ],
)
def test_options_without_sense_are_refused(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        _prepare(tmp_path, [], lines=[{"text": "a"}], **options)


def test_a_job_with_other_images_is_refused(tmp_path):
    _prepare(tmp_path)
    vision = VisionSection(kind="clip", image_size=8, patch_size=4, image_token_id=TOKEN)
    values = {"data.path": str(tmp_path / "out"), "data.seq_len": 16, "model.vocab_size": 258}
    assert training_faults({**values, "model.vision": vision}) == []
    (fault,) = training_faults({**values, "model.vision": VisionSection()})
    assert "holds images, and model.vision.kind=none" in fault.fact
    other = vision.model_copy(update={"patch_size": 2})
    (fault,) = training_faults({**values, "model.vision": other})
    assert "each 4 tokens" in fault.fact and "each 16 tokens" in fault.rule
    merged = vision.model_copy(
        update={"kind": "qwen2_vl", "patch_size": 2, "spatial_merge_size": 4}
    )
    (fault,) = training_faults({**values, "model.vision": merged})
    assert "each 1 tokens" in fault.rule and "--patch-size 8" in fault.remedy
