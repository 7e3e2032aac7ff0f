"""Rows with images: where they lie, which labels count, and what a rank reads of them."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from raymega.config.vision.section import VisionSection
from raymega.data.images.image_batch import ImageShare
from raymega.data.images.image_rows import MOST_DRAWN, ImageRows
from raymega.data.loader import _image_counts
from raymega.data.rows import TEXT, Row

TOKEN, PATCHES = 99, 4
VISION = VisionSection(
    kind="clip", image_size=8, patch_size=4, num_layers=2, hidden_size=8, num_heads=2, ffn_hidden_size=8,
    image_token_id=TOKEN,
)  # fmt: skip
DOCUMENTS = (18, 3, 11)


def _plain(seed=0):
    """A row of text whose label at each document's end does not count."""
    tokens = np.random.default_rng(seed).integers(0, 64, sum(DOCUMENTS) + 1)
    mask = np.ones(sum(DOCUMENTS), bool)
    mask[np.cumsum(DOCUMENTS) - 1] = False
    return Row(tokens=tokens[:-1], labels=tokens[1:], mask=mask, documents=DOCUMENTS)


def _rule(name="0/images/train", *, is_drawn=True):
    return ImageRows(vision=VISION, name=name, is_drawn=is_drawn)


def _rows(count=40):
    return [_rule().row(_plain(sample), sample) for sample in range(count)]


def test_an_image_is_whole_tokens_of_one_document():
    counts = set()
    for row in _rows():
        assert ((row.tokens == TOKEN) == (row.image_places != TEXT)).all()
        found = row.image_places[row.image_places != TEXT]
        assert found.tolist() == list(range(len(row.images) * PATCHES)), "in order, each once"
        for begin, end in pairwise(accumulate(DOCUMENTS, initial=0)):
            here = row.image_places[begin:end]
            inside = here[here != TEXT]
            assert len(inside) % PATCHES == 0 and (inside.size == 0 or inside[0] % PATCHES == 0)
            for image in set((inside // PATCHES).tolist()):
                places = np.flatnonzero(here // PATCHES == image)
                assert places.tolist() == list(range(places[0], places[0] + PATCHES))
            counts.add((end - begin, len(inside) // PATCHES))
    assert counts == {*((18, n) for n in range(4)), (3, 0), (11, 0), (11, 1), (11, 2)}
    assert MOST_DRAWN == 3


def test_labels_of_images_do_not_count_and_those_of_text_do():
    for sample, row in enumerate(_rows()):
        plain = _plain(sample)
        inside = np.flatnonzero(plain.mask)
        # the label of a token is the next token
        assert (row.labels[inside] == np.append(row.tokens[1:], -1)[inside]).all()
        next_is_image = np.append(row.image_places[1:] != TEXT, False)
        assert (row.mask == (plain.mask & ~next_is_image)).all()


def _drawn(sample, name="0/images/train"):
    """Tokens and pixels of a sample with the same text as the others."""
    row = _rule(name).row(_plain(), sample)
    return row.tokens.tolist(), [image().tobytes() for image in row.images]


def test_images_depend_on_seed_sample_and_document_alone():
    samples = [_drawn(sample) for sample in range(9)]
    assert samples == [_drawn(sample) for sample in range(9)]
    assert all(_drawn(n, "1/images/train") != drawn for n, drawn in enumerate(samples))
    pixels = [image for _, images in samples for image in images]
    assert len(set(pixels)) == len(pixels) > 9, "no two images are alike"


def test_rows_of_text_have_no_images_where_none_are_drawn():
    row = _rule(is_drawn=False).row(_plain(), 3)
    assert row.images == () and (row.image_places == TEXT).all()
    assert (row.tokens == _plain().tokens).all() and (row.mask == _plain().mask).all()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_share_the_images_of_a_micro_batch_in_order(size):
    rows = _rows(3)
    wanted = np.stack([image() for row in rows for image in row.images])

    def take(arrays):
        return torch.from_numpy(np.stack(arrays))

    shares = [ImageShare(vision=VISION, index=index, size=size) for index in range(size)]
    found = [share.images(rows, take) for share in shares]
    pixels = torch.cat([each.pixels for each in found]).numpy()
    # squares row after row, as a picture shows them
    pixels = pixels.reshape(-1, 2, 2, 3, 4, 4).transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 8, 8)
    assert (pixels[: len(wanted)] == wanted).all() and not pixels[len(wanted) :].any()
    for each in found:  # the features of a row's images follow those of the rows before it
        places = each.places[each.places != TEXT]
        assert places.tolist() == list(range(len(wanted) * PATCHES))


def test_a_micro_batch_without_images_has_one_black_image_a_rank():
    row = _rule(is_drawn=False).row(_plain(), 3)
    found = ImageShare(vision=VISION, index=1, size=2).images(
        [row], lambda arrays: torch.from_numpy(np.stack(arrays))
    )
    assert found.pixels.shape == (1, 4, 3, 4, 4) and not found.pixels.any()
    assert (found.places == TEXT).all()


SEVERAL = VISION.model_copy(
    update={"kind": "qwen2_vl", "image_size": 0, "max_pixels": 6 * 16, "image_token_id": TOKEN}
)


def _several(count=30):
    rule = ImageRows(vision=SEVERAL, name="0/images/train", is_drawn=True)
    return [rule.row(_plain(sample), sample) for sample in range(count)]


def test_images_of_several_sizes_have_the_tokens_of_their_size():
    grids = set()
    for row in _several():
        at = 0
        for number, image in enumerate(row.images):
            rows, columns = image.grid
            assert image().shape == (3, 4 * rows, 4 * columns)
            own = np.flatnonzero(row.image_places // 6 == number)
            assert own.tolist() == list(range(own[0], own[0] + rows * columns)), "end to end"
            assert (row.image_places[own] % 6).tolist() == list(range(rows * columns))
            assert own[0] >= at and (row.tokens[own] == TOKEN).all()
            grids.add(image.grid)
            at = own[-1] + 1
        assert (row.image_places != TEXT).sum() == sum(each.num_patches for each in row.images)
    assert len(grids) > 8 and max(rows * columns for rows, columns in grids) <= 6


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_give_each_image_the_room_of_the_largest(size):
    rows = [row for row in _several() if row.images][:2]
    images = [image for row in rows for image in row.images]

    def take(arrays):
        return torch.from_numpy(np.stack(arrays))

    shares = [ImageShare(vision=SEVERAL, index=index, size=size) for index in range(size)]
    found = [share.images(rows, take) for share in shares]
    room = max(image.num_patches for image in images)
    assert {each.num_patches for each in found} == {room}
    pixels = torch.cat([each.pixels for each in found]).numpy()
    grids = torch.cat([each.grids for each in found]).tolist()
    for image, own, grid in zip(images, pixels, grids, strict=False):
        assert tuple(grid) == image.grid
        for at in range(room):
            top, left = (4 * each for each in divmod(at, image.grid[1]))
            square = image()[:, top : top + 4, left : left + 4] if at < image.num_patches else 0
            assert (own[at] == square).all()
    assert all(grid == [1, 1] for grid in grids[len(images) :]), "a black image has one token"
    for each in found:
        places = each.places[each.places != TEXT]
        wanted = [
            n * room + at for n, image in enumerate(images) for at in range(image.num_patches)
        ]
        assert places.tolist() == wanted


def test_an_image_that_a_rank_has_a_part_of_counts_as_that_part():
    rows = _several(4)
    halves = np.stack([np.arange(0, 16), np.arange(16, 32)])
    found = [_image_counts(rows, np.stack([half] * 4), 6) for half in halves]
    assert sum(tokens for tokens, _ in found) == sum((row.tokens == TOKEN).sum() for row in rows)
    assert sum(images for _, images in found) == pytest.approx(sum(len(row.images) for row in rows))
