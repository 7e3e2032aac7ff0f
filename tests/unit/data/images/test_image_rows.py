"""Rows with images: where they lie, which labels count, and what a rank reads of them."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from raymega.config.vision.section import VisionSection
from raymega.data.images.image_batch import ImageShare
from raymega.data.images.image_rows import MOST_DRAWN, ImageRows
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
    assert (pixels[: len(wanted)] == wanted).all() and not pixels[len(wanted) :].any()
    for each in found:  # the features of a row's images follow those of the rows before it
        places = each.places[each.places != TEXT]
        assert places.tolist() == list(range(len(wanted) * PATCHES))


def test_a_micro_batch_without_images_has_one_black_image_a_rank():
    row = _rule(is_drawn=False).row(_plain(), 3)
    found = ImageShare(vision=VISION, index=1, size=2).images(
        [row], lambda arrays: torch.from_numpy(np.stack(arrays))
    )
    assert found.pixels.shape == (1, 3, 8, 8) and not found.pixels.any()
    assert (found.places == TEXT).all()
