"""Random changes of images: those of the formulas that torchvision documents, by sample alone, and none in validation."""

import colorsys
from math import log

import numpy as np
import pytest

from raymega.config.vision.augment import AugmentSection
from raymega.data.images.augment import augmented, crop_box
from raymega.data.images.image_rows import image_rows_of
from raymega.errors import PlanError
from tests.mutations.images import LLAVA
from tests.support.jobs import make_test_plan
from tests.unit.data.images.test_image_rows import _plain

IMAGE = np.random.default_rng(5).integers(256, size=(3, 24, 24), dtype=np.uint8)
CHANGES = "data.augment={crop_scale: [0.3, 1.0], horizontal_flip: 0.5, brightness: 0.4, hue: 0.1}"


def _random(seed=0):
    return np.random.default_rng(seed)


def test_parts_have_shares_and_ratios_within_their_bounds_and_lie_anywhere():
    section = AugmentSection(crop_scale=(0.2, 0.6), crop_ratio=(0.75, 4 / 3))
    random, shares, ratios, places = _random(), [], [], set()
    for _ in range(2000):
        box = crop_box(300, 300, section, random)
        assert box.top + box.height <= 300 and box.left + box.width <= 300
        shares.append(box.height * box.width / 90_000)
        ratios.append(log(box.width / box.height))
        places.add((box.top, box.left))
    # every part fits: a uniform share, and a uniform logarithm of the ratio
    assert np.mean(shares) == pytest.approx(0.4, abs=0.02) and 0.19 < min(shares) < 0.22
    assert max(shares) == pytest.approx(0.6, abs=0.01)
    assert abs(min(ratios) + log(4 / 3)) < 0.03 and abs(max(ratios) - log(4 / 3)) < 0.03
    assert len(places) > 1500


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 60, (0, 20, 10, 20)), (60, 10, (20, 0, 20, 10)), (10, 15, (0, 0, 10, 15))],
    ids=["too-wide", "too-tall", "within"],
)
def test_where_no_part_fits_the_middle_within_the_ratio_is_taken(height, width, box):
    # twice the image's area
    section = AugmentSection.model_construct(crop_scale=(2.0, 2.0), crop_ratio=(0.5, 2.0))
    found = crop_box(height, width, section, _random())
    assert (found.top, found.left, found.height, found.width) == box


def test_the_image_becomes_the_part_that_was_drawn():
    """Red grows downwards and green to the right, so that colours of edges are places of edges."""
    section = AugmentSection(crop_scale=(0.2, 0.5), crop_ratio=(0.5, 2.0))
    rows, columns = np.mgrid[:24, :24].astype(np.uint8)
    image = np.stack([rows * 10, columns * 10, rows])
    for seed in range(5):
        box = crop_box(24, 24, section, _random(seed))
        found = augmented(image, section, _random(seed)).astype(int)
        assert found.shape == image.shape
        for colours, first, size in ((found[0], box.top, box.height), (found[1], box.left, box.width)):  # fmt: skip
            assert abs(colours.min() - first * 10) <= 5
            assert abs(colours.max() - (first + size - 1) * 10) <= 5


def test_the_whole_image_and_a_flip_are_exact():
    whole = AugmentSection(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), horizontal_flip=0.5)
    found = [augmented(IMAGE, whole, _random(seed)) for seed in range(20)]
    is_flipped = [(each == IMAGE[:, :, ::-1]).all() for each in found]
    assert all(a or (each == IMAGE).all() for a, each in zip(is_flipped, found, strict=True))
    assert 0 < sum(is_flipped) < 20


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_blended_with_black_mean_grey_or_the_pixels_grey(name):
    wide, random = 0.5, _random(3)
    found = augmented(IMAGE, AugmentSection(**{name: wide}), _random(3)).astype(float)
    # the numbers are drawn in a fixed order: the flip, the order, the three factors
    random.random(), random.permutation(4)
    names = ("brightness", "contrast", "saturation")
    drawn = {each: random.uniform(1 - wide, 1 + wide) if each == name else random.uniform(1, 1) for each in names}  # fmt: skip
    grey = (IMAGE.astype(float).transpose(1, 2, 0) @ [0.299, 0.587, 0.114]).round()
    other = {"brightness": 0.0, "contrast": round(grey.mean()), "saturation": grey}[name]
    factor = drawn[name]
    wanted = np.clip(other + factor * (IMAGE.astype(float) - other), 0, 255)
    assert np.abs(found - wanted).max() <= 2 and abs(factor - 1) > 0.05


def test_hues_turn_and_grey_stays():
    section = AugmentSection(hue=0.5)
    red = np.zeros((3, 4, 4), np.uint8)
    red[0] = 200
    turned = augmented(red, section, _random(1))[:, 0, 0] / 255
    hue, saturation, value = colorsys.rgb_to_hsv(*turned)
    assert 0.02 < hue < 0.98 and saturation > 0.95 and value == pytest.approx(200 / 255, abs=0.01)
    grey = np.full((3, 4, 4), 90, np.uint8)
    assert (augmented(grey, section, _random(1)) == grey).all()


def test_images_change_by_sample_alone_and_only_in_training():
    plan = make_test_plan(*LLAVA, CHANGES)
    train, valid = (image_rows_of(plan.job, split) for split in ("train", "valid"))
    plain = image_rows_of(make_test_plan(*LLAVA).job, "train")

    def images(rule, sample):
        return [image() for image in rule.row(_plain(), sample).images]

    for sample in range(8):
        found, again, before = (images(rule, sample) for rule in (train, train, plain))
        assert all(map(np.array_equal, found, again))
        assert not any(map(np.array_equal, found, before))
    assert valid.augment == AugmentSection()
    # another sample changes the same image in another way
    one, two = (train._augmented(lambda: IMAGE, sample, 0) for sample in (1, 2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((CHANGES,), "data.augment with model.vision.kind=none"),
        ((*LLAVA, "data.augment.crop_scale=[0.5]"), "data.augment.crop_scale"),
        ((*LLAVA, "data.augment.crop_scale=[0.9, 0.5]"), "data.augment.crop_scale"),
        ((*LLAVA, "data.augment={crop_scale: [0.5, 1], crop_ratio: [2, 1]}"), "data.augment.crop_ratio"),
        ((*LLAVA, "data.augment.crop_ratio=[1, 2]"), "without crop_scale"),
    ],
)  # fmt: skip
def test_changes_without_effect_or_out_of_bounds_are_refused(overrides, told):
    with pytest.raises(PlanError, match=told.replace(".", r"\.")):
        make_test_plan(*overrides)
