"""`raymega init`: files that load and plan as they stand, on the planner's grid; questions; the editor's schema."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from raymega import api
from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.load.pinned_source import teacher_faults
from raymega.cli.init.command import asked
from raymega.cli.init.images import set_image_rows
from raymega.cli.init.job_text import SCHEMA_FILE, schema_text
from raymega.cli.init.new_job import Answers, new_job
from raymega.cli.init.recipes import RECIPES
from raymega.cli.main import app
from raymega.config.heads.section import HeadSection
from raymega.config.load import parse_job
from raymega.config.vision.section import VisionSection
from raymega.convert.huggingface.importer import hf_import
from raymega.data.format import META_FILE, ImageMeta, encode_meta, read_meta
from raymega.errors import ConfigError
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.tensor_table import is_tower_frozen
from raymega.planner.search.search import search
from tests.golden.commands import called
from tests.support.jobs import VERIFY
from tests.unit.convert.folders import NOW, make_model, write_folder
from tests.unit.convert.huggingface.test_config import QWEN2_VL
from tests.unit.convert.huggingface.test_images import LLAVA
from tests.unit.data.datasets import write_dataset

QWEN_TOWER = {
    "kind": "qwen2_vl", "patch_size": 4, "spatial_merge_size": 2, "num_layers": 2, "hidden_size": 16,
    "num_heads": 2, "ffn_hidden_size": 32, "image_token_id": 255,
}  # fmt: skip
MODEL = make_model(num_layers=4, hidden_size=32, num_heads=8, ffn_hidden_size=64, max_positions=64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "theirs", MODEL)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes(
        (tmp_path / "theirs" / "config.json").read_bytes()
    )
    hf_import(tmp_path / "theirs", str(tmp_path / "ours"), created=NOW)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "model", "start"),
    [
        ("pretrain", None, "none"),
        ("pretrain --model bare --gpus 3 --gpu cpu", MODEL, "none"),
        ("continue --model theirs", MODEL, "theirs-raymega"),
        ("continue --model bare/ --data tokens", MODEL, "bare-raymega"),
        ("continue --model ours", MODEL, "ours"),
        ("sft --model theirs", MODEL, "theirs-raymega"),
        ("distill --model theirs --teacher ours", MODEL, "theirs-raymega"),
        pytest.param("pretrain --gpus 8", None, "none", marks=pytest.mark.wide),
        pytest.param("pretrain --gpus 12 --gpu a100", None, "none", marks=pytest.mark.wide),
    ],
)
def test_a_file_loads_and_plans_as_it_stands(words, model, start, folder):
    ended = called("init", *words.split(), "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    text = Path("new.yaml").read_text()
    job, choice = api.load_chosen("new.yaml")
    assert choice is None, "the layout is in the file"
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    jsonschema.validate(yaml.safe_load(text), json.loads(Path(SCHEMA_FILE).read_text()))
    plan = api.plan(job)
    gpus = re.search(r"--gpus (\d+)", words)
    assert plan.grid.world_size == (int(gpus[1]) if gpus else 2)
    assert job.checkpoint.init_from.rpartition("/")[2] == start
    if model is not None:
        sizes = {"make_vocab_size_divisible_by": job.model.make_vocab_size_divisible_by}
        assert job.model == model.model_copy(update=sizes)
    assert job.data.path.rpartition("/")[2] == ("tokens" if "--data" in words else "synthetic")
    assert ("path: my-tokens" in text) is ("--data" not in words)
    # every field has a comment above it
    lines = text.splitlines()
    fields = [n for n, line in enumerate(lines) if re.match(r" +\w+: .", line)]
    assert all("#" in lines[n - 1] for n in fields)


def test_rows_are_no_longer_than_what_an_indexer_chooses(tmp_path, monkeypatch):
    """DeepSeek-V3.2's blocks choose all tokens of rows of up to index_topk, though it has more positions."""
    monkeypatch.chdir(tmp_path)
    config = {
        "model_type": "deepseek_v32", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4,
        "intermediate_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 2, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 16,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    ended = called("init", "continue", "--model", ".", "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    assert parse_job(Path("new.yaml")).job().data.seq_len == 16


@pytest.mark.parametrize(
    ("words", "source", "rules"),
    [
        (
            "classify --model theirs",
            "my-labels.jsonl --format classification",
            ("head.score.weight",),
        ),
        ("sft --model headed", "my-labels.jsonl --format token_classification", ()),
        ("lora --model rewarding", "my-pairs.jsonl --format preference", ()),
    ],
)
def test_a_head_has_the_rows_that_it_reads(words, source, rules, folder):
    """Of a folder with a head its own, of a language model's one for classes, which begins anew."""
    for name, head in (
        ("headed", HeadSection(kind="token_classification", num_labels=5)),
        ("rewarding", HeadSection(kind="reward")),
    ):
        write_folder(folder / name, MODEL.model_copy(update={"head": head}))
    name = words.split()[2]
    hf_import(folder / name, str(folder / f"{name}-raymega"), created=NOW)
    ended = called("init", *words.split(), "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    assert f"raymega data prepare {source} " in Path("new.yaml").read_text()
    job = api.load_job("new.yaml")
    assert job.model.head.is_on and job.data.packing == "best_fit"
    assert (job.preference.loss_type == "bradley_terry") is (job.model.head.kind == "reward")
    assert job.checkpoint.reinit == rules
    assert start_faults(job.checkpoint, job.model) == []


@pytest.mark.parametrize(
    ("words", "source", "start"),
    [
        ("vision", "--image-size 32 --patch-size 8 --tokenizer bytes", "none"),
        ("vision --model llava", "--image-size 28 --patch-size 14 --tokenizer", "llava-raymega"),
        ("vision --model qwen", "--image-size 448 --patch-size 8 --tokenizer", "qwen-raymega"),
        ("continue --model llava", "--image-size 28 --patch-size 14", "llava-raymega"),
        ("lora --model llava", "--image-size 28 --patch-size 14", "llava-raymega"),
        ("pretrain --model llava", "--image-size 28 --patch-size 14", "none"),
    ],
)
def test_a_model_that_reads_images_has_rows_with_images(words, source, start, folder):
    for name, config in (("llava", LLAVA), ("qwen", QWEN2_VL)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    ended = called("init", *words.split(), "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    assert f"my-images.parquet --format images {source}" in Path("new.yaml").read_text()
    job, choice = api.load_chosen("new.yaml")
    vision = job.model.vision
    assert choice is None and vision.is_on and job.data.packing == "best_fit"
    assert job.data.seq_len >= 2 * vision.num_patches and api.plan(job).grid.world_size == 2
    assert job.checkpoint.init_from.rpartition("/")[2] == start
    is_tuned = words.startswith("vision --model")
    assert is_tower_frozen(job.model) is (is_tuned or words.startswith("lora"))
    assert job.optimizer.lr == (2e-5 if is_tuned else job.optimizer.lr)


def test_a_small_tower_takes_the_images_of_a_dataset_and_a_model_of_text_is_refused(folder):
    images = ImageMeta(size=28, num_patches=4, token_id=270)
    write_dataset(folder / "tokens", vocab_size=300)
    meta = replace(read_meta(folder / "tokens"), images=images)
    (folder / "tokens" / META_FILE).write_bytes(encode_meta(meta))
    ended = called("init", "vision", "--data", "tokens", "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    model = parse_job("new.yaml").job().model
    assert (model.vocab_size, model.vision.image_token_id) == (300, 270)
    assert model.vision.sizes == images.sizes
    ended = called("init", "vision", "--model", "theirs", "--out", "other.yaml")
    assert ended.code == 2 and "raymega init continue --model theirs" in ended.stderr


def test_images_of_several_sizes_leave_half_of_a_row_for_text(folder):
    """A model for images of up to 4,096 tokens, on two CPU processes with rows of 128."""
    vision = {**QWEN_TOWER, "max_pixels": 4096 * 64, "min_pixels": 64, "mean_pixels": 8192}
    model = MODEL.model_copy(update={"vision": VisionSection(**vision)})
    values = {"data": {"seq_len": 128}, "model": {"vision": dict(vision)}}
    source = set_image_rows(values, model, longest=4096)
    assert source.endswith("--max-pixels 4096 --min-pixels 64 --patch-size 8")
    assert values["model"]["vision"] == {**vision, "max_pixels": 4096, "mean_pixels": 4096}
    assert values["data"]["seq_len"] == 128


def test_a_distillation_has_a_teacher_and_nothing_else_has(folder):
    made = new_job(Answers(recipe="distill", model="theirs", teacher="ours", out=Path("a.yaml")))
    Path("a.yaml").write_text(made.text)
    section = parse_job("a.yaml").job().distillation
    assert section.is_live and section.teacher_checkpoint.endswith("ours")
    assert teacher_faults(section.teacher_checkpoint, section.teacher_model) == []
    for words in ("distill --model theirs", "sft --model theirs --teacher ours"):
        ended = called("init", *words.split())
        assert ended.code == 2 and "--teacher" in ended.stderr


def test_a_model_of_its_own_has_the_vocabulary_of_the_dataset(folder):
    write_dataset(folder / "tokens", vocab_size=1031)
    ended = called("init", "pretrain", "--data", "tokens", "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    assert parse_job("new.yaml").job().model.vocab_size == 1031


@pytest.mark.parametrize(("words", "workers"), [("--gpu cpu", 2), ("--gpu h100", 8), ("", 2)])
def test_without_a_count_a_job_has_two_processes_or_a_node_of_gpus(words, workers, folder):
    ended = called("init", "pretrain", *words.split(), "--out", "new.yaml")
    assert ended.code == 0, ended.stderr
    assert api.plan(api.load_job("new.yaml")).grid.world_size == workers


def test_the_grid_is_the_one_that_the_planner_recommends(folder):
    made = new_job(
        Answers(recipe="continue", model="theirs", gpus=4, gpu="cpu", out=Path("a.yaml"))
    )
    Path("a.yaml").write_text(made.text)
    job = parse_job("a.yaml").job()
    (best,) = search(job, CATALOGUE["cpu"], num_devices=4, top=1).best
    assert best.plan.grid == api.plan(job).grid


@pytest.mark.parametrize(
    ("given", "told", "wanted"),
    [
        ({"recipe": ""}, ["continue", "m", 8, "h200", "t"],
         {"recipe": "continue", "model": "m", "gpus": 8, "gpu": "h200", "data": "t"}),
        ({"recipe": "pretrain"}, [0], {"recipe": "pretrain", "gpus": 0}),
        ({"recipe": "continue"}, ["m", 0], {"recipe": "continue", "model": "m"}),
        ({"recipe": ""}, ["", "", "", ""], {"recipe": "pretrain"}),
    ],
)  # fmt: skip
def test_questions_are_those_whose_answers_are_missing(given, told, wanted):
    questions = []

    def ask(question, default):
        questions.append(question)
        return told[len(questions) - 1] or default

    answers = asked(Answers(**given, out=Path("x")), ask, is_count_known=False)
    assert answers == replace(Answers(recipe="", out=Path("x")), **wanted)
    assert len(questions) == len(told)


def test_a_count_below_zero_is_refused():
    with pytest.raises(ConfigError, match="--gpus -3; a run has at least one worker"):
        asked(Answers(recipe="pretrain", out=Path("x")), lambda *_: -3, is_count_known=False)


def test_help_names_every_recipe_and_nothing_is_overwritten(folder):
    told = " ".join(called("init", "--help").stdout.split())
    assert all(name in told for name in RECIPES)
    Path("pretrain.yaml").write_text("mine")
    assert called("init", "pretrain").code == 2
    assert Path("pretrain.yaml").read_text() == "mine"


def test_schema_command_prints_what_editors_get():
    assert called("schema").stdout.strip() == schema_text()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("raymega ini", "init"),
        ("raymega init --gp", "--gpus\n--gpu"),
        ("raymega init con", "continue"),
    ],
)
def test_shells_complete_commands_options_and_recipes(words, found):
    place = str(words.count(" "))
    env = {"_RAYMEGA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    result = CliRunner().invoke(app, [], prog_name="raymega", env=env)
    assert result.output.strip() == found


def test_a_file_of_measured_cpus_is_no_gpu(folder):
    Path("mine.yaml").write_text("name: mine\nlike: cpu\n")
    assert (
        called("init", "pretrain", "--gpu", "mine.yaml", "--gpus", "2", "--out", "a.yaml").code == 0
    )
    job = api.load_job("a.yaml")
    assert (job.cluster.device, job.precision.dtype) == ("cpu", "float32")
    assert job.cluster.accelerator == "mine.yaml"


@pytest.mark.parametrize("name", ["1e3.yaml", "my job.yaml", "-x.yaml"])
def test_a_file_of_any_name_loads_and_its_lines_can_be_pasted(name, folder):
    ended = called("init", "pretrain", "--out", name)
    assert ended.code == 0, ended.stderr
    assert api.load_job(name).run.name == name.removesuffix(".yaml").replace(" ", "-").lstrip("-")
    program, command, path = shlex.split(ended.stdout.splitlines()[-1])
    assert (program, command) == ("raymega", "train")
    assert called("plan", path).code == 0, "no option of the command"


@pytest.mark.parametrize(
    "short", [{"parallel": "auto"}, {"plugins": ["acme.plugins"]}, {"precision": {"dtype": "fp8"}}]
)
def test_editors_take_the_short_forms_of_a_job_file(short):
    job = yaml.safe_load(VERIFY.read_text()) | {"optimizer": {"lr": 0.001}}
    jsonschema.validate(job | short, json.loads(schema_text()))
