"""Scores and text of models that read images equal transformers', on any grid, from files of images."""

import json
from math import prod

import numpy as np
import pytest
import torch
from PIL import Image

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.data.format import END_OF_DOCUMENT
from raymega.evaluate.requests import Scores, pack_requests, unpack_requests
from raymega.evaluate.run import EvalOptions, prepare_evaluation
from raymega.evaluate.worker import score_requests
from raymega.generate.answers import unpack_task
from raymega.generate.prompts import Prompts
from raymega.generate.run import GenerateOptions, prepare_generation
from raymega.generate.worker import continue_prompts
from raymega.plan.run_plan import read_plan
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support.ranks import run_grid
from tests.support.references import hf_llava

pytestmark = pytest.mark.dist

NOW = "2025-01-01T00:00:00+00:00"
LIMIT = 1e-10
END = 256
GRIDS = {
    "one rank": "tp=1",
    "tp2 sp pp2": "tp=2,sequence_parallel=true,pp=2",
    "cp2 dp2": "cp=2,dp=2",
}
PROMPTS = (("<image>the cat", 1), ("a<image> b<image>c", 2), ("no picture", 0))


@pytest.fixture(scope="module", params=["clip", "qwen2_vl", "native"])
def model(request, tmp_path_factory):
    """A model of transformers, the folder of its import with three pictures beside it, and options of their sizes."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = hf_llava.make_model(request.param, seed=1)
    theirs.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(byte_tokenizer("<other>", "<image>"))
    settings = {"eos_token": END_OF_DOCUMENT}
    (folder / "theirs" / "tokenizer_config.json").write_text(json.dumps(settings))
    hf_import(folder / "theirs", str(folder / "ours"), created=NOW, make_vocab_size_divisible_by=8)
    for number in range(3):
        # 3 x 2, 1 x 5 and 2 x 2 tokens where they keep their shape
        shape = ((30, 20, 3), (7, 32, 3), (18, 25, 3))[number]
        pixels = np.random.default_rng(number).integers(256, size=shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    sizes = hf_llava.sizes_of(request.param).items()
    return theirs, folder, tuple(f"model.vision.{name}={value}" for name, value in sizes)


def _pixels(folder, number, vision):
    """A picture as the model sees it, [3, 12, 12], or of about its own shape as transformers' processor makes it."""
    with Image.open(folder / f"{number}.png") as opened:
        height, width = (hf_llava.IMAGE_SIZE,) * 2
        if vision.max_pixels:
            # seconds, which ranks do without
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            rule = (hf_llava.SQUARE, hf_llava.SQUARE**2, hf_llava.MAX_PIXELS)
            height, width = smart_resize(opened.height, opened.width, *rule)
        resized = opened.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(resized).transpose(2, 0, 1)


def _tokens(text, images):
    """Bytes of a text, with the tokens of an image for each mark."""
    first, *parts = text.split("<image>")
    found = list(first.encode())
    for part, image in zip(parts, images, strict=True):
        found += [hf_llava.TOKEN] * prod(hf_llava.grid_of(image)) + list(part.encode())
    return found


def _vision(folder, sizes):
    return prepare_generation(
        str(folder / "ours"),
        Prompts(texts=("a",)),
        GenerateOptions(grid="tp=1", overrides=sizes),
    ).plan.job.model.vision


def _greedy(theirs, folder, vision, count):
    """Transformers' likeliest tokens behind each prompt, by a whole pass for each."""
    answers, seen = [], 0
    for text, num_images in PROMPTS:
        images = [_pixels(folder, seen + at, vision) for at in range(num_images)]
        tokens, seen = _tokens(text, images), seen + num_images
        begin = len(tokens)
        for _ in range(count):
            with torch.no_grad():
                logits = hf_llava.logits(theirs, torch.tensor([tokens]), images, vision)
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[begin:])
    return answers


def _write_prompts(folder):
    """The prompts as JSON lines: paths, and base64 in the second one."""
    names = iter(["0.png", "1.png", "2.png"])
    lines = [
        json.dumps({"prompt": text, "images": [next(names) for _ in range(count)]})
        for text, count in PROMPTS
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return Prompts(file=folder / "prompts.jsonl")


def _continued(env, plan_json, uri, task):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)
    return continue_prompts(plan, scorer, env.groups, unpack_task(task), device=env.device)


@pytest.mark.sample(1)
def test_greedy_text_behind_images_is_that_of_transformers(model):
    theirs, folder, sizes = model
    uri, prompts = str(folder / "ours"), _write_prompts(folder)
    wanted = _greedy(theirs, folder, _vision(folder, sizes), 4)
    sampling = Sampling(max_tokens=4)
    for grid in GRIDS.values():
        options = GenerateOptions(sampling=sampling, grid=grid, overrides=sizes)
        ready = prepare_generation(uri, prompts, options)
        found = run_grid(_continued, ready.plan.grid, ready.plan.to_json(), uri, ready.task.pack())
        assert all(each == wanted for each in found), grid
    by_theirs = prepare_generation(
        uri, prompts, GenerateOptions(sampling=sampling, overrides=sizes)
    )
    assert [list(each.tokens) for each in by_theirs.run("", lambda *_: None)] == wanted


def _scored(env, plan_json, uri, packed):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)
    requests = unpack_requests(packed)
    return score_requests(plan, scorer, env.groups, requests, device=env.device)


ROWS = (
    {"set": "near", "prompt": "<image>", "text": "cat", "images": ["0.png"]},
    {"set": "far", "prompt": "<image>", "text": "cat", "images": ["1.png"]},
    {"set": "far", "prompt": "a<image> b<image>", "choices": ["one", "two"], "answer": "B", "images": ["0.png", "2.png"]},
)  # fmt: skip


def _their_scores(theirs, folder, vision):
    """Sums of log-probabilities of each row's answers, by transformers; texts with their end."""
    found = []
    for row in ROWS:
        images = [_pixels(folder, name[0], vision) for name in row["images"]]
        for answer in row.get("choices", [row.get("text")]):
            end = [] if "choices" in row else [END]
            tokens = _tokens(row["prompt"], images) + list(answer.encode()) + end
            with torch.no_grad():
                logits = hf_llava.logits(theirs, torch.tensor([tokens]), images, vision)[0]
            log_probs = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
            found.append(float(log_probs[-len(answer) - len(end) :].sum()))
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_scores_of_rows_with_images_are_those_of_transformers(model, grid):
    theirs, folder, sizes = model
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    uri = str(folder / "ours")
    options = EvalOptions(grid=grid, seq_len=40, overrides=sizes)
    ready = prepare_evaluation(uri, "images", folder / "rows.jsonl", options)
    packed = pack_requests(ready.questions.requests)
    wanted = _their_scores(theirs, folder, ready.plan.job.model.vision)
    assert abs(wanted[0] - wanted[1]) > 1e-3, "the same words behind another image"
    for log_probs, is_greedy in run_grid(
        _scored, ready.plan.grid, ready.plan.to_json(), uri, packed
    ):
        scores = [
            Scores(log_probs=a, is_greedy=b) for a, b in zip(log_probs, is_greedy, strict=True)
        ]
        np.testing.assert_allclose([each.sum() for each in log_probs], wanted, rtol=LIMIT)
        metrics, samples = ready.questions.judge(scores)
        np.testing.assert_allclose(metrics["near/loss"], -wanted[0] / 4, rtol=LIMIT)
        np.testing.assert_allclose(metrics["loss"], -sum(wanted[:2]) / 8, rtol=LIMIT)
        assert metrics["far/accuracy"] == (wanted[3] > wanted[2])
        assert len(samples) == 3


@pytest.mark.wide
def test_the_served_application_answers_texts(model):
    pytest.importorskip("ray.serve", reason="needs raymega[serve]")
    from raymega.generate.ray_serve import Model

    theirs, folder, _ = model
    found = Model(str(folder / "theirs"), device="cpu").answer({"prompt": "no", "max_tokens": 2})
    tokens = list(b"no")
    for _ in range(2):
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    assert found["tokens"] == tokens[2:]
