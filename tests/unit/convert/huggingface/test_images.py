"""config.json of models that read images: what is refused at import, and images of no whole patches."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from raymega.config.vision.section import VisionSection
from raymega.convert.huggingface.config import model_from
from raymega.convert.huggingface.families.images.llava import (
    current_preprocessor,
    separate_preprocessor,
    with_pixels,
)
from raymega.errors import ConfigError

LLAVA = {
    "model_type": "llava", "image_token_index": 299,
    "text_config": {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 900, "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
    },
    "vision_feature_select_strategy": "full",
}  # fmt: skip


def _changed(**changes):
    config = json.loads(json.dumps(LLAVA))
    for name, value in changes.items():
        part, _, inner = name.rpartition("__")
        (config[part] if part else config)[inner] = value
    return config


def test_pixels_behind_the_last_whole_patch_are_left_out():
    # SigLIP so400m: 27 patches of 14 pixels, as a convolution without padding has them
    vision = model_from(_changed(vision_config__image_size=384)).vision
    assert (vision.image_size, vision.num_patches) == (378, 27**2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vision_feature_layer": 0}, r"model\.vision\.feature_layer=0"),
        ({"image_token_index": 300}, r"model\.vision\.image_token_id=300"),
        ({"vision_config__num_attention_heads": 3}, r"model\.vision\.num_heads=3"),
        ({"text_config__architectures": ["LlamaForSequenceClassification"]}, r"model\.head\.kind"),
        ({"vision_config__image_size": [28, 28]}, "value of another kind"),
        ({"vision_config__patch_size": 0}, "value of another kind"),
        ({"vision_config__layer_norm_eps": "small"}, "value of another kind"),
        ({"image_mean": 0.5}, "value of another kind"),
    ],
)
def test_what_no_job_may_have_is_refused_at_import(changes, match):
    with pytest.raises(ConfigError, match=match):
        model_from(_changed(**changes))


def _processor(**changes):
    found = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "size": {"shortest_edge": 384},
             "crop_size": 384, "do_convert_rgb": True}  # fmt: skip
    return json.dumps({**found, **changes}, indent=4).encode()


SEEN = {"image_mean": (0.1, 0.2, 0.3), "image_std": (0.5, 0.6, 0.7)}


def test_a_carried_preprocessor_goes_along_unless_the_job_has_changed_what_it_says():
    vision = model_from(_changed(vision_config__image_size=384)).vision.model_copy(update=SEEN)
    assert vision.image_size == 378, "the last 6 pixels are no whole patch"
    assert current_preprocessor(vision, _processor()) == _processor()
    # other statistics of pixels: the rest stays
    other = vision.model_copy(update={"image_mean": (0.4, 0.4, 0.4)})
    found = json.loads(current_preprocessor(other, _processor()))
    assert found == json.loads(_processor(image_mean=[0.4, 0.4, 0.4]))
    # another size, or a file that says nothing: what the model was trained on
    small = vision.model_copy(update={"image_size": 28})
    for carried in (_processor(), b"3", b"{"):
        found = json.loads(current_preprocessor(small, carried))
        assert found["size"] == {"height": 28, "width": 28} and not found["do_center_crop"]
        assert found["image_mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_broken_file_of_the_preprocessor_is_named(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json' cannot be read"):
        with_pixels(LLAVA, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        {"do_normalize": False}, {"do_rescale": False}, {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5}, {"image_mean": 0.25, "image_std": 0.5}, {},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_inside", [False, True])
def test_pixels_are_normalised_as_the_preprocessor_does(tmp_path, flags, is_inside):
    """Whatever its flags say, in a file of its own or in the processor's, where transformers 5 writes it."""
    told = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], **flags,
            "do_resize": True, "size": {"height": 28, "width": 28}, "do_center_crop": False}  # fmt: skip
    files = {"preprocessor_config.json": json.dumps(told).encode()}
    if is_inside:
        other = {"preprocessor_config.json": b'{"image_mean": [0.9, 0.9, 0.9]}'}
        inner = {"image_processor": told, "patch_size": 14}
        files = {**other, "processor_config.json": json.dumps(inner).encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    vision = model_from(with_pixels(LLAVA, tmp_path)).vision
    pixels = np.random.default_rng(0).integers(256, size=(28, 28, 3), dtype=np.uint8)
    theirs = CLIPImageProcessorPil.from_dict(told)(Image.fromarray(pixels), return_tensors="np")
    ours = (pixels / 255 - vision.image_mean) / vision.image_std
    assert ours.transpose(2, 0, 1) == pytest.approx(
        theirs["pixel_values"][0].astype(float), rel=1e-5, abs=1e-5
    )
    # an export has it in a file of its own, unless the job has changed it as it was
    separate = separate_preprocessor(files)
    assert "image_processor" not in json.loads(separate.get("processor_config.json", b"{}"))
    carried = separate["preprocessor_config.json"]
    assert json.loads(carried) == told and current_preprocessor(vision, carried) == carried
    other = vision.model_copy(update={"image_mean": (0.4, 0.4, 0.4)})
    again = CLIPImageProcessorPil.from_dict(json.loads(current_preprocessor(other, carried)))
    found = again(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
    assert found.transpose(1, 2, 0).astype(float) == pytest.approx(
        (pixels / 255 - 0.4) / vision.image_std, rel=1e-5, abs=1e-5
    )


def test_a_preprocessor_that_leaves_sizes_as_they_are_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    with pytest.raises(ConfigError, match="do_resize=false; raymega resizes every image"):
        with_pixels(LLAVA, tmp_path)


def test_a_preprocessor_of_several_sizes_says_their_bounds():
    vision = VisionSection(
        kind="qwen2_vl", patch_size=14, spatial_merge_size=2, min_pixels=3136, max_pixels=50176
    )
    for carried in (b"{", json.dumps({"min_pixels": 1, "do_resize": True}).encode()):
        found = json.loads(current_preprocessor(vision, carried))
        assert (found["min_pixels"], found["max_pixels"]) == (3136, 50176)
        assert found["size"] == {"shortest_edge": 3136, "longest_edge": 50176}
        assert found["do_resize"]
    processor = Qwen2VLImageProcessorPil.from_dict(json.loads(current_preprocessor(vision, b"{")))
    pixels = np.random.default_rng(0).integers(256, size=(100, 400, 3), dtype=np.uint8)
    (_, rows, columns) = processor(Image.fromarray(pixels), return_tensors="np")["image_grid_thw"][
        0
    ]
    assert (14 * rows, 14 * columns) == vision.sizes.resized(100, 400)
