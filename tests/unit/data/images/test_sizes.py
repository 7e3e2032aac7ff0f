"""Sizes to which images are resized are those of transformers' processor of Qwen2-VL."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from raymega.config.vision.sizes import ImageSizes

EDGES = st.integers(1, 4000)


@given(
    height=EDGES,
    width=EDGES,
    square=st.sampled_from([6, 28, 32]),
    least=st.integers(1, 40),
    more=st.integers(0, 400),
)
@example(height=7, width=32, square=6, least=1, more=5)
@example(height=28, width=5600, square=28, least=4, more=16)
def test_an_image_has_the_size_that_transformers_gives_it(height, width, square, least, more):
    bounds = (least * square**2, (least + more) * square**2)
    sizes = ImageSizes(square, 0, *bounds)
    try:
        wanted = smart_resize(height, width, square, *bounds)
    except ValueError:
        with pytest.raises(ValueError, match="a factor of 200"):
            sizes.resized(height, width)
        return
    if np.prod(wanted) > bounds[1]:
        with pytest.raises(ValueError, match=rf"of which an image has {least + more} at most"):
            sizes.resized(height, width)
        return
    found = sizes.resized(height, width)
    assert found == wanted
    assert sizes.grid(*found) == (wanted[0] // square, wanted[1] // square)


def test_a_small_image_has_a_token_where_no_least_area_is_given():
    sizes = ImageSizes(28, max_pixels=2 * 28**2)
    assert sizes.resized(3, 5) == (28, 56) and sizes.resized(3, 3) == (28, 28)
    assert sizes.num_patches == 2


def test_one_size_is_that_of_all_images():
    sizes = ImageSizes(14, 336)
    assert sizes.resized(7, 4000) == (336, 336)
    assert sizes.num_patches == 576
