"""Datasets of images of several sizes: each has its own size and tokens, in rows, windows and stores of a job."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from raymega.config.vision.section import VisionSection
from raymega.config.vision.sizes import ImageSizes
from raymega.data.arrow import TokenStream
from raymega.data.checks import training_faults
from raymega.data.images.stored import StoredImages
from raymega.data.open_split import Shape, open_split
from raymega.data.rows import TEXT
from raymega.errors import ConfigError
from raymega.prepare.images import documents
from tests.unit.prepare.images.test_image_rows import PATCHES, TOKEN, _prepare
from tests.unit.prepare.images.test_image_rows import ROWS as SQUARE_ROWS

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")

SQUARE, MOST = 4, 6
SIZES = ImageSizes(SQUARE, min_pixels=16, max_pixels=MOST * SQUARE**2)
OPTIONS = {"images": SIZES}
SHAPES = ((8, 12), (4, 17), (20, 5), (8, 8), (3, 3), (40, 60))
WANTED = ((2, 3), (1, 4), (5, 1), (2, 2), (1, 1), (2, 3))
"""Heights and widths of pictures, and the rows and columns of their tokens."""


def _picture(number):
    stream = io.BytesIO()
    random = np.random.default_rng(number)
    pixels = random.integers(0, 256, (*SHAPES[number], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _row(*numbers):
    text = f"t{numbers[0]}" + "<image>." * len(numbers)
    return {
        "text": text,
        "images": [{"bytes": _picture(n), "path": None} for n in numbers],
        "prompt": None,
    }


ROWS = [_row(0, 1), _row(2), _row(3, 4, 5), _row(1, 0), _row(5, 2)]


def _resized(number):
    rows, columns = WANTED[number]
    whole = Image.open(io.BytesIO(_picture(number)))
    resized = whole.resize((SQUARE * columns, SQUARE * rows), Image.Resampling.BICUBIC)
    return np.asarray(resized).transpose(2, 0, 1)


def test_each_image_has_its_own_size_in_packed_rows(tmp_path):
    meta = _prepare(tmp_path, ROWS, **OPTIONS)
    assert (meta.images.size, meta.images.num_patches) == (0, MOST)
    shape = Shape(seq_len=32, packing="best_fit", window=5, multiple=4)
    source, seen = open_split(str(tmp_path / "out"), "train", shape, seed=0), []
    known = {_resized(number).tobytes(): number for number in range(len(SHAPES))}
    for index in range(source.num_windows):
        row = source.row(index)
        assert ((row.tokens == TOKEN) == (row.image_places != TEXT)).all()
        assert [image.grid for image in source.images_in(index)] == [
            image.grid for image in row.images
        ]
        for at, image in enumerate(row.images):
            number = known[image().tobytes()]
            assert image.grid == WANTED[number] and image().shape == _resized(number).shape
            own = row.image_places[row.image_places // MOST == at] % MOST
            assert own.tolist() == list(range(image.num_patches))
            seen.append(number)
    assert sorted(seen) == sorted([0, 1, 2, 3, 4, 5, 1, 0, 5, 2])


@pytest.mark.parametrize(
    ("rows", "options", "seq_len", "most"),
    [(SQUARE_ROWS, {}, 7, PATCHES), (ROWS, OPTIONS, 5, MOST)],
    ids=["one-size", "several"],
)
def test_windows_that_begin_inside_an_image_have_the_rest_of_it(
    tmp_path, rows, options, seq_len, most
):
    meta = _prepare(tmp_path, rows, **options)
    stream = TokenStream(tmp_path / "out", meta.splits["train"])
    whole = StoredImages(stream.read_images, meta.images).held(0, stream.num_tokens)
    row_of = open_split(str(tmp_path / "out"), "train", Shape(seq_len=seq_len), seed=0).row
    cut = 0
    for index in range((stream.num_tokens - 1) // seq_len):
        row, places = row_of(index), whole.places[seq_len * index : seq_len * (index + 1)]
        assert ((row.image_places == TEXT) == (places == TEXT)).all()
        for own, all_ in zip(row.image_places, places, strict=True):
            if own != TEXT:
                assert own % most == all_ % most
                assert row.images[own // most].grid == whole.images[all_ // most].grid
                assert (row.images[own // most]() == whole.images[all_ // most]()).all()
        # a small image that ended before the window is none of its own
        assert {*(row.image_places[row.image_places != TEXT] // most)} == {*range(len(row.images))}
        cut += bool(places[0] != TEXT and places[0] % most)
    assert cut > 2


def _line(height, width):
    stream = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(stream, "PNG")
    return {"text": "<image>", "images": [base64.b64encode(stream.getvalue()).decode()]}


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2, 500), r"image 0 is too long and narrow: it has 500 x 2 pixels, and its edges differ by a factor of 200"),
        ((2, 300), r"image 0 is too long and narrow: it has 300 x 2 pixels, and would be 1 x \d+ tokens, of which an image has 6"),
    ],
)  # fmt: skip
def test_a_picture_that_is_too_narrow_is_told_by_its_row(tmp_path, shape, told):
    lines = [_line(8, 8), _line(*shape)]
    with pytest.raises(ConfigError, match=rf"b\.jsonl@\d+ has no document \({told}"):
        _prepare(tmp_path / "strict", [], lines=lines, **OPTIONS)
    meta = _prepare(tmp_path / "lax", [], lines=lines, max_bad_lines=1, **OPTIONS)
    assert meta.source.num_bad_lines == 1


def test_a_row_is_refused_by_the_pixels_that_it_has(tmp_path, monkeypatch):
    # a grid of eight bytes is before each
    monkeypatch.setattr(documents, "MOST_IMAGE_BYTES", 3 * 6 * SQUARE**2 + 8)
    with pytest.raises(ConfigError, match=r"its 2 images are 448 bytes of pixels"):
        _prepare(tmp_path, [_row(0), _row(1, 2)], **OPTIONS)


def test_a_job_with_other_bounds_is_refused(tmp_path):
    _prepare(tmp_path, ROWS, **OPTIONS)
    vision = VisionSection(
        kind="qwen2_vl", patch_size=2, spatial_merge_size=2, min_pixels=16, max_pixels=96, image_token_id=TOKEN
    )  # fmt: skip
    values = {"data.path": str(tmp_path / "out"), "data.seq_len": 16, "model.vocab_size": 258}
    assert training_faults({**values, "model.vision": vision}) == []
    for changes in ({"max_pixels": 112}, {"min_pixels": 32}, {"patch_size": 1}):
        other = vision.model_copy(update=changes)
        (fault,) = training_faults({**values, "model.vision": other})
        assert "holds images of 16 to 96 pixels in all, each at most 6 tokens" in fault.fact
        assert f"--max-pixels {other.max_pixels} --patch-size {other.sizes.square}" in fault.remedy
    one = vision.model_copy(update={"image_size": 8, "min_pixels": 0, "max_pixels": 0})
    (fault,) = training_faults({**values, "model.vision": one})
    assert "those of 8 pixels, each 4 tokens" in fault.rule


@pytest.mark.parametrize(
    "changes", [{"image_size": 8}, {"max_pixels": 15}, {"min_pixels": 97}, {"square": 0}]
)
def test_bounds_without_sense_are_refused(tmp_path, changes):
    with pytest.raises(ConfigError, match=r"--min-pixels \d+ and --max-pixels"):
        _prepare(tmp_path, [], lines=[{"text": "a"}], images=SIZES._replace(**changes))
