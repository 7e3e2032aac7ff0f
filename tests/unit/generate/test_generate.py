"""`raymega generate`: what it refuses, the folder that it exports, chats, and the lines that serve."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.errors import ConfigError, NumericsError
from raymega.evaluate.tokenizer import model_files
from raymega.generate import run as generate_run
from raymega.generate.answers import Task
from raymega.generate.exported import exported, keep_export
from raymega.generate.prompts import Prompts, read_prompts
from raymega.generate.run import GenerateOptions, generate, prepare_generation
from raymega.generate.serving import serving_line
from raymega.messages import EntryOutput
from raymega.plan.sampling import Sampling, sampling_of
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.references import hf_models

NOW = "2025-01-01T00:00:00+00:00"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An imported model with a tokenizer, a chat template and generation settings."""
    folder = tmp_path_factory.mktemp("models")
    hf_models.make_model("llama2").save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "theirs" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "theirs" / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    hf_import(folder / "theirs", str(folder / "ours"), created=NOW, make_vocab_size_divisible_by=8)
    # the same without a template, and without a tokenizer
    for name in ("plain", "bare"):
        shutil.copytree(folder / "ours", folder / name)
        (folder / name / "hf" / "chat_template.jinja").unlink()
    (folder / "bare" / "hf" / "tokenizer.json").unlink()
    return folder


REFUSED = {
    "no prompt": ({}, {}, "0 of --prompt, --file and --chat are given"),
    "two kinds": ({"texts": ("a",), "file": Path("x")}, {}, "2 of --prompt"),
    "empty": ({"texts": ("a", "")}, {}, "prompt 2 of 2 is empty"),
    "long": ({"texts": ("a" * 40,)}, {}, "has 40 tokens; a prompt has at least 1 token"),
    "absent file": ({"file": Path("absent")}, {}, "--file absent cannot be read: No such file"),
    "a folder": ({"file": Path("/")}, {}, "cannot be read: Is a directory"),
    "no lines": ({"file": "\n \n"}, {}, "has no prompt"),
    "no object": ({"file.jsonl": "3\n"}, {}, "file.jsonl:1: 3; a line is {'prompt': text}"),
    "no JSON": ({"file.jsonl": '{"prompt": "a"}\n{\n'}, {}, "file.jsonl:2"),
    "chat without role": ({"chat": '[{"content": "hi"}]'}, {}, "a chat is a list of"),
    "chat of a tool": ({"chat": '[{"role": "tool"}]'}, {}, "refuses chat 1: no tools"),
    "temperature": ({"texts": ("a",)}, {"temperature": -1.0}, "--temperature -1"),
    "nan": ({"texts": ("a",)}, {"temperature": float("nan")}, "--temperature nan"),
    "top_p": ({"texts": ("a",)}, {"top_p": 0.0}, "--top-p 0"),
    "top_k": ({"texts": ("a",)}, {"top_k": -1}, "--top-k -1"),
    "max_tokens": ({"texts": ("a",)}, {"max_tokens": 0}, "--max-tokens 0"),
    "seed": ({"texts": ("a",)}, {"seed": -1}, "--seed -1"),
    "stop": ({"texts": ("a",)}, {"stop": ("",)}, "--stop ''"),
}


@pytest.mark.parametrize(("given", "sampling", "told"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused(given, sampling, told, model, tmp_path):
    prompts = {}
    for name, content in given.items():
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
            content = tmp_path / name
        prompts[name.partition(".")[0]] = content
    options = GenerateOptions(sampling=replace(Sampling(), **sampling))
    with pytest.raises(ConfigError) as error:
        prepare_generation(str(model / "ours"), Prompts(**prompts), options)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("absent", {}, "there is no checkpoint at"),
        ("bare", {}, "has no tokenizer"),
        ("ours", {"grid": "tp=3"}, "parallel.tp=3"),
        ("ours", {"overrides": ("precision.dtype=int4",)}, "precision.dtype"),
    ],
)
def test_bad_model_or_grid_is_refused(name, options, told, model):
    with pytest.raises(ConfigError) as error:
        prepare_generation(str(model / name), Prompts(texts=("a",)), GenerateOptions(**options))
    assert told in str(error.value)


def test_chat_is_rendered_by_the_template_or_refused_without_one(model, tmp_path):
    lines = [CHAT, {"messages": [*CHAT, {"role": "assistant", "content": "yes"}]}]
    (tmp_path / "one.json").write_text(json.dumps(CHAT))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, texts in {
        "one.json": ["<user>hi<assistant>"],
        "two.jsonl": ["<user>hi<assistant>", "<user>hi<assistant>yes<assistant>"],
    }.items():
        ready = prepare_generation(
            str(model / "ours"), Prompts(chat=tmp_path / name), GenerateOptions()
        )
        assert ready.texts == texts
        assert ready.task.end_ids == [2, 10, 256]  # config.json, generation_config.json, tokenizer
    with pytest.raises(ConfigError) as error:
        prepare_generation(
            str(model / "plain"), Prompts(chat=tmp_path / "one.json"), GenerateOptions()
        )
    assert "has no chat template" in str(error.value) and "use --prompt" in str(error.value)


def test_a_chat_is_rendered_with_its_tools_as_in_training(model, tmp_path):
    files = {
        **model_files(open_checkpoint(str(model / "ours"))),
        "chat_template.jinja": b"{{ tools | map(attribute='name') | join }}:{{ messages[0].content }}",
    }
    told = []
    for name, tools in {"a.json": [{"name": "f"}], "b.json": '[{"name": "g"}]'}.items():
        (tmp_path / name).write_text(json.dumps({"messages": CHAT, "tools": tools}))
        prompts = Prompts(chat=tmp_path / name)
        told += [each.text for each in read_prompts(prompts, files, source="x")]
    assert told == ["f:hi", "g:hi"]
    (tmp_path / "c.json").write_text(json.dumps({"messages": CHAT, "tools": 3}))
    with pytest.raises(ConfigError, match="its tools are a list"):
        read_prompts(Prompts(chat=tmp_path / "c.json"), files, source="x")


def test_half_of_a_character_in_a_prompt_is_told(tmp_path):
    """JSON may hold it, and so may a command line that is not UTF-8; a tokenizer raised a TypeError."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "a\\ud83d"}\n')
    for prompts in (Prompts(file=tmp_path / "a.jsonl"), Prompts(texts=("x", "a\udcff"))):
        with pytest.raises(ConfigError, match=r"prompt 2 of 2 has .* as character 2"):
            read_prompts(prompts, {}, source="x")


def test_prompts_of_a_file_whose_suffix_is_in_capitals_are_json(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"prompt": "a"}\n')
    (prompt,) = read_prompts(Prompts(file=tmp_path / "A.JSONL"), {}, source="x")
    assert prompt.text == "a"


def test_exported_folder_is_whole_and_used_again(model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    checkpoint = open_checkpoint(str(model / "ours"))
    with exported(checkpoint, dtype="float32", folder=tmp_path / "kept") as folder:
        assert str(AutoModelForCausalLM.from_pretrained(folder).dtype) == "torch.float32"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<user>hi"
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [256, 10]
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    keep_export(checkpoint, dtype="float32", folder=folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    with pytest.raises(ConfigError, match="give another --folder"):
        keep_export(checkpoint, dtype="float64", folder=folder)
    # a temporary one goes
    with exported(checkpoint, dtype="float32", folder=None) as folder:
        assert (folder / "config.json").exists()
    assert not folder.exists()


def test_answers_come_in_order_and_stop_strings_span_tokens(model):
    uri, texts = str(model / "ours"), ["the cat", "a", "she said"]
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=3)
    whole = generate(uri, texts, options=GenerateOptions(sampling=sampling, batch_size=2))
    assert [answer.prompt for answer in whole] == texts
    text = max((answer.text for answer in whole), key=len)
    stop = text[2:5]
    cut = generate(
        uri, texts, options=GenerateOptions(sampling=replace(sampling, stop=(stop,)), batch_size=1)
    )
    for before, after in zip(whole, cut, strict=True):
        assert after.text == before.text.partition(stop)[0]
        assert after.tokens == before.tokens[: len(after.tokens)]
        assert (after.finish_reason == "stop") == (stop in before.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_with_their_prompt_and_place(
    model, monkeypatch, temperature
):
    from raymega.generate.with_transformers import Engine

    options = GenerateOptions(sampling=Sampling(max_tokens=4, temperature=temperature))
    ready = prepare_generation(str(model / "ours"), Prompts(texts=("the cat", "a")), options)
    begin = Engine.__init__

    def broken(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.model.lm_head.weight.data[5] = torch.nan

    monkeypatch.setattr(Engine, "__init__", broken)
    with pytest.raises(NumericsError, match="of prompt 1 for token 1 of its answer are NaN"):
        ready.run("local", lambda *_: None)
    # on a grid the workers say so by a token that is none
    on_grid = replace(ready, options=replace(options, grid="tp=1"))
    output = EntryOutput(rank=0, data=b"[[5, 6], [7, 8, -1]]")
    done = SimpleNamespace(fault=None)
    monkeypatch.setattr(generate_run, "session_at", lambda _address: nullcontext())
    monkeypatch.setattr(
        generate_run, "run_entry", lambda *_, on_report, **__: on_report(output) or done
    )
    with pytest.raises(NumericsError, match="of prompt 2 for token 3 of its answer are NaN"):
        on_grid.run("local", lambda *_: None)


def test_an_encoder_reads_the_end_of_its_text_once():
    # T5's tokenizer writes it, one that was trained here does not
    from raymega.generate.with_transformers import Engine

    class Model:
        config = SimpleNamespace(
            is_encoder_decoder=True, eos_token_id=1, decoder_start_token_id=0, num_hidden_layers=2
        )
        device = "cpu"

        def generate(self, *, input_ids, attention_mask, **_):
            self.read = [
                row[mask > 0].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)
            ]
            return torch.zeros(len(input_ids), 2, dtype=torch.int64)

    engine = Engine.__new__(Engine)
    engine.model = Model()
    task = Task(
        prompts=[[7, 1], [7], [7, 8, 9, 1]], limits=[1, 1, 1], sampling=Sampling(max_tokens=1),
        tokenizer_json=byte_tokenizer(), end_ids=[1],
    )  # fmt: skip
    assert engine.generate(task, batch_size=4) == [[0]] * 3
    assert engine.model.read == [[7, 1], [7, 1], [7, 8, 9, 1]]


def test_line_serves_the_folder_that_was_written(model, tmp_path):
    for engine, program in {"vllm": "vllm", "sglang": "python"}.items():
        words = serving_line(str(model / "ours"), engine=engine, port=81, folder=tmp_path / "m")
        assert words[0] == program and words[-1] == "81"
        assert str(tmp_path / "m") in words and "ours" in words
        cut = serving_line(
            str(model / "ours"), engine=engine, port=81, grid="tp=2", folder=tmp_path / "m"
        )
        assert cut == [*words, "--tensor-parallel-size", "2"]
    assert (tmp_path / "m" / "config.json").exists()
    with pytest.raises(ConfigError, match="an engine is one of vllm, sglang"):
        serving_line(str(model / "ours"), engine="tgi")
    with pytest.raises(ConfigError, match="by tensor parallelism alone"):
        serving_line(str(model / "ours"), grid="pp=2")
    with pytest.raises(ConfigError, match="pip install"):
        serving_line(str(model / "ours"), engine="sglang", starts=True, folder=tmp_path / "m")


@pytest.mark.parametrize(
    ("stop", "stops"), [("User:", ("User:",)), (["User:", "\n"], ("User:", "\n")), ([], ())]
)
def test_a_text_to_stop_at_in_a_request_is_one_text(stop, stops):
    request = {"prompt": "a", "stop": stop, "temperature": 1, "seed": 3}
    assert sampling_of(request) == Sampling(stop=stops, temperature=1.0, seed=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2.5), ("max_tokens", "9"), ("seed", float("inf")), ("temperature", "hot"), ("temperature", 10**400),
        ("stop", 3), ("stop", [3]), ("stop", {"a": 1}),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_in_a_request_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        sampling_of({field: value})
    assert sampling_of({field: None}) == Sampling()


@pytest.mark.wide
def test_ray_serve_files_are_of_the_form_that_serve_reads():
    schema = pytest.importorskip("ray.serve.schema", reason="needs raymega[serve]")
    root = Path(__file__).parents[3] / "cluster"
    for name, path in {
        "serve": "raymega.generate.ray_serve:build",
        "serve-vllm": "ray.serve.llm:build_openai_app",
    }.items():
        found = schema.ServeDeploySchema.model_validate(
            yaml.safe_load((root / f"{name}.yaml").read_text())
        )
        assert found.applications[0].import_path == path


@pytest.mark.wide
def test_ray_serve_application_answers_as_the_command(model, tmp_path):
    pytest.importorskip("ray.serve", reason="needs raymega[serve]")
    from raymega.generate.ray_serve import Model, build

    checkpoint = open_checkpoint(str(model / "ours"))
    keep_export(checkpoint, dtype="float64", folder=tmp_path / "m")
    found = Model(str(tmp_path / "m"), device="cpu").answer(
        {"prompt": "a", "max_tokens": 6, "temperature": 1.0, "seed": 3}
    )
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=3)
    (wanted,) = generate(str(model / "ours"), ["a"], options=GenerateOptions(sampling=sampling))
    assert (found["text"], found["tokens"]) == (wanted.text, list(wanted.tokens))
    assert build({"folder": str(tmp_path / "m")})
    for wrong in ({"prompt": "a", "top": 3}, ["a"], "a", None):
        with pytest.raises(ConfigError, match="it is an object with prompt"):
            Model(str(tmp_path / "m"), device="cpu").answer(wrong)
