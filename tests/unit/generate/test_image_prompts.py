"""Images of prompts: which file a mark stands for, what is refused, and the way to the workers."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from raymega.config.vision.section import VisionSection
from raymega.data.images.files import BrokenImageError, prompt_images, read_image
from raymega.data.text_codec import TextCodec, prompt_ids, sample_images, sample_prompt_faults
from raymega.errors import ConfigError
from raymega.evaluate.tasks.images import images as image_questions
from raymega.evaluate.tasks.images import read_questions
from raymega.evaluate.tasks.task import Settings
from raymega.evaluate.tokenizer import tokenizer_in
from raymega.generate.answers import unpack_task
from raymega.generate.image_prompts import prompt_tokens, read_images
from raymega.generate.prompts import Prompt, Prompts, read_prompts
from raymega.generate.run import make_task
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.unit.data.datasets import write_dataset

TOKEN = 257
VISION = VisionSection(
    kind="clip", image_size=8, patch_size=4, num_layers=2, hidden_size=8, num_heads=2, ffn_hidden_size=8,
    image_token_id=TOKEN,
)  # fmt: skip
CODEC = TextCodec(byte_tokenizer("<image>").encode())


@pytest.fixture
def pictures(tmp_path):
    for number in range(3):
        Image.fromarray(np.full((8, 8, 3), 50 * number, np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def _level(pixels):
    return int(pixels[0, 0, 0]) // 50


def test_marks_of_prompts_take_files_in_order(pictures):
    files = tuple(pictures / f"{number}.png" for number in (2, 0, 1))
    given = Prompts(texts=("<image>a<image>", "b", "<image>"), images=files)
    prompts = read_prompts(given, {}, source="")
    images = read_images(prompts, VISION, pictures)
    assert [[*map(_level, own)] for own in images.pixels] == [[2, 0], [], [1]]
    tokens = prompt_tokens(CODEC, prompts, images)
    assert tokens == [[TOKEN] * 4 + [97] + [TOKEN] * 4, [98], [TOKEN] * 4]
    with pytest.raises(ConfigError, match="--prompt has 1 marks <image>, and --image is given 3"):
        read_prompts(Prompts(texts=("<image>",), images=files), {}, source="")


def test_files_and_base64_of_json_lines_are_read_beside_the_file(pictures):
    raw = (pictures / "1.png").read_bytes()
    line = {"prompt": "<image><image>", "images": ["2.png", base64.b64encode(raw).decode()]}
    (pictures / "p.jsonl").write_text(json.dumps(line))
    prompts = read_prompts(Prompts(file=pictures / "p.jsonl"), {}, source="")
    assert [*map(_level, read_images(prompts, VISION, pictures).pixels[0])] == [2, 1]


def test_a_task_has_the_same_pixels_behind_the_way_to_the_workers(pictures):
    prompts = [Prompt("a<image>", ({"path": "1.png"},)), Prompt("b")]
    images = read_images(prompts, VISION, pictures)
    files = {"tokenizer.json": byte_tokenizer("<image>").encode()}
    task = make_task(files, prompts, Sampling(), most=64, images=images)
    again = unpack_task(task.pack())
    assert [len(own) for own in again.images] == [1, 0] and again.prompts == task.prompts
    assert (again.images[0][0] == images.pixels[0][0]).all()


@pytest.mark.parametrize(
    ("prompt", "vision", "told"),
    [
        (Prompt("a", ("0.png",)), VISION, "prompt 1 has 1 image and 0 marks"),
        (Prompt("<image>"), VISION, "prompt 1 has 0 images and 1 mark"),
        (Prompt("<image>", ("9.png",)), VISION, r"prompt 1: '9.png' is no file"),
        (Prompt("<image>", (7,)), VISION, "prompt 1: 7 is no path"),
        (Prompt("<image>", ("broken.png",)), VISION, "broken.png' is broken"),
        (Prompt("<image>", ("0.png",)), VisionSection(), "the model reads text alone"),
    ],
)
def test_what_is_no_image_or_has_no_mark_is_refused(pictures, prompt, vision, told):
    (pictures / "broken.png").write_bytes((pictures / "0.png").read_bytes()[:40])
    with pytest.raises(ConfigError, match=told):
        prompt_tokens(CODEC, [prompt], read_images([prompt], vision, pictures))


def test_images_of_a_runs_samples_are_checked_before_it_starts(pictures):
    paths = [str(pictures / "1.png")]
    (images,) = prompt_images(["a <image>"], paths, VISION.sizes, purpose="a test")
    assert _level(images[0]) == 1
    assert prompt_ids(CODEC, "a<image>", (), VISION) == [97] + [TOKEN] * 4
    write_dataset(pictures / "data", train=(50,), valid=(40,))
    (pictures / "data" / "tokenizer.json").write_text(byte_tokenizer("<image>"))
    values = {
        "run.samples_every": 1, "run.sample_prompts": ("a<image>",), "run.sample_tokens": 2, "data.seq_len": 7,
        "data.path": str(pictures / "data"), "data.sources": (), "data.stages": (), "model.vision": VISION,
    }  # fmt: skip
    assert list(sample_prompt_faults(values | {"run.sample_images": tuple(paths)})) == []
    (fault,) = sample_prompt_faults(values)
    assert fault.fact == "run.sample_images: 0 images have 1 marks <image>"
    faults = sample_prompt_faults(values | {"run.sample_images": tuple(paths), "data.seq_len": 6})
    assert [each.fact for each in faults] == ["run.sample_prompts has 'a<image>' of 5 tokens"]


def test_a_sample_that_spells_an_images_token_is_refused(pictures):
    paths = [str(pictures / "1.png")]
    (own,) = sample_images(CODEC, ["a<image>"], paths, VISION)
    assert _level(own[0]) == 1 and sample_images(CODEC, ["<image>"], [], VisionSection()) == []
    other = TextCodec(byte_tokenizer("<|image_pad|>").encode())
    assert sample_images(other, ["<image>"], paths, VISION), "a mark is the tokenizer's own token"
    with pytest.raises(
        ConfigError, match=r"'<\|image_pad\|><image>' has 1 marks <image> and 2 tok"
    ):
        sample_images(other, ["<|image_pad|><image>"], paths, VISION)
    unknown = VISION.model_copy(update={"image_token_id": 999})
    with pytest.raises(ConfigError, match="has 1 marks <image> and 0 tokens"):
        sample_images(CODEC, ["<image>"], paths, unknown)
    with pytest.raises(ConfigError, match=r"run.sample_images: .*gone.png' is no file"):
        sample_images(CODEC, ["<image>"], [str(pictures / "gone.png")], VISION)


@pytest.mark.parametrize("text", ["a" * 300, "a" * 4000, "x\0y", "."])
def test_a_text_that_is_no_name_of_a_file_is_told(pictures, text):
    with pytest.raises(BrokenImageError):
        read_image(text, pictures, VISION.sizes, purpose="a test")


def test_an_image_of_bytes_is_that_of_its_file(pictures):
    stream = io.BytesIO((pictures / "2.png").read_bytes())
    coded = base64.b64encode(stream.getvalue()).decode()
    assert _level(read_image({"bytes": coded}, pictures, VISION.sizes, purpose="a test")) == 2


def test_the_mark_of_a_files_byte_order_is_no_part_of_a_prompt(tmp_path):
    for name, line in {"a.txt": "Once upon", "a.jsonl": '{"prompt": "Once upon"}'}.items():
        (tmp_path / name).write_text(line, encoding="utf-8-sig")
        (prompt,) = read_prompts(Prompts(file=tmp_path / name), {}, source="m")
        assert prompt.text == "Once upon"


@pytest.mark.parametrize("option", ["file", "chat"])
def test_images_beside_a_file_of_prompts_are_refused(pictures, option):
    (pictures / "p.jsonl").write_text('{"prompt": "<image>", "images": ["1.png"]}')
    given = Prompts(images=(pictures / "0.png",), **{option: pictures / "p.jsonl"})
    with pytest.raises(ConfigError, match="--image is given 1 times without --prompt"):
        read_prompts(given, {}, source="")


def test_images_of_a_line_are_a_list(pictures):
    (pictures / "p.jsonl").write_text('{"prompt": "<image>", "images": "1.png"}')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: 1\.png; images is a list"):
        read_prompts(Prompts(file=pictures / "p.jsonl"), {}, source="")


def test_keys_without_a_value_are_left_out_of_a_question(pictures):
    row = {"set": None, "prompt": None, "text": "a <image>", "choices": None, "images": ["1.png"]}
    (pictures / "rows.jsonl").write_text(json.dumps(row))
    (question,) = read_questions(pictures / "rows.jsonl", VISION.sizes)
    assert (question.part, question.prompt, question.answers) == ("", "", ("a <image>",))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": None}, r"text is \[None\], no text"),
        ({"text": "a", "prompt": 3}, "prompt is 3, no text"),
        ({"text": "a", "images": "1.png"}, "images is '1.png', no list"),
        ({"choices": "ab", "answer": 0}, "choices is 'ab', no list"),
        ({"choices": [], "answer": 0}, "answer 0 of 0 choices"),
        ({"choices": ["a", 2], "answer": 0}, "choices is .'a', 2., no text"),
        ({"choices": ["a"]}, "KeyError: 'answer'"),
        ({"text": "a", "set": "a/b"}, "set is 'a/b'; its characters are letters"),
    ],
)
def test_a_question_of_another_form_is_told(tmp_path, row, told):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=told):
        list(read_questions(tmp_path / "rows.jsonl", VISION.sizes))


def test_an_answer_without_a_token_is_told(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "ab", "choices": ["c", ""], "answer": 0})
    )
    tokenizer = tokenizer_in({"tokenizer.json": byte_tokenizer("<image>").encode()}, "a test")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1 has 0 images, 0 marks <image> and 2 tok"):
        image_questions(tmp_path / "rows.jsonl", tokenizer, Settings(seq_len=8, vision=VISION))
