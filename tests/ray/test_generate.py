"""`raymega generate` on Ray, samples of a run in its records, and the Ray Serve application over HTTP."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from mlflow import MlflowClient

from raymega.data.format import TOKENIZER_FILE
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.servers.ports import free_port
from tests.unit.data.datasets import write_dataset

pytestmark = [pytest.mark.ray, pytest.mark.wide]
VERIFY = Path(__file__).parents[2] / "jobs" / "verify.yaml"
PROMPTS = ("ab", "once upon")


def _raymega(*words):
    command = [sys.executable, "-m", "raymega", *words, "--address", "local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on two ranks that has shown samples, and the events of its driver."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    write_dataset(folder / "data", train=(50,) * 5, valid=(40,) * 5)
    (folder / "data" / TOKENIZER_FILE).write_text(byte_tokenizer())
    settings = [
        f"data.path={folder / 'data'}", f"checkpoint.uri={folder}", "run.steps=6",
        "run.samples_every=3", f"run.sample_prompts={list(PROMPTS)}", "run.sample_tokens=5",
        "model.vocab_size=257", "parallel.pp=2", "checkpoint.every=6",
    ]  # fmt: skip
    events, _ = _raymega("train", str(VERIFY), *(word for s in settings for word in ("--set", s)))
    return folder / "verify", events


def test_samples_are_events_and_texts_in_mlflow(run):
    folder, events = run
    samples = [event for event in events if event["event"] == "samples"]
    assert [event["step"] for event in samples] == [3, 6]
    assert all(event["prompts"] == list(PROMPTS) for event in samples)
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("raymega")
    (found,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'verify'")
    assert [a.path for a in client.list_artifacts(found.info.run_id, "samples")] == [
        "samples/step-00000003.txt",
        "samples/step-00000006.txt",
    ]


@pytest.mark.parametrize("grid", [(), ("--grid", "tp=2"), ("--grid", "pp=2,dp=2")])
def test_command_continues_as_the_run_did(grid, run):
    folder, events = run
    last = [event for event in events if event["event"] == "samples"][-1]
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    answers, errors = _raymega("generate", str(folder), *words, "--max-tokens", "5", *grid)
    assert [answer["text"] for answer in answers] == last["texts"], errors
    assert [answer["prompt"] for answer in answers] == last["prompts"]


def test_served_model_answers_over_http(run, tmp_path, local_ray):
    serve = pytest.importorskip("ray.serve", reason="needs raymega[serve]")
    from raymega.checkpoint.tools.inspection import open_checkpoint
    from raymega.generate.exported import keep_export
    from raymega.generate.ray_serve import build

    folder, events = run
    keep_export(open_checkpoint(str(folder)), dtype="float64", folder=tmp_path / "model")
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build({"folder": str(tmp_path / "model"), "device": "cpu"}), name="raymega")
        sent = json.dumps({"prompt": PROMPTS[0], "max_tokens": 5}).encode()
        with urlopen(Request(f"http://127.0.0.1:{port}/", data=sent), timeout=300) as answer:
            found = json.loads(answer.read())
        with pytest.raises(HTTPError) as error:
            urlopen(Request(f"http://127.0.0.1:{port}/", data=b'{"prompt": 3}'), timeout=300)
        assert error.value.code == 400 and b"it is an object with prompt" in error.value.read()
    finally:
        serve.shutdown()
    samples = [event for event in events if event["event"] == "samples"]
    assert found["text"] == samples[-1]["texts"][0]
