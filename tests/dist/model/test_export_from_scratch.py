"""A run from scratch, exported: transformers loads model and tokenizer, and generation ends by itself."""

import json
from functools import partial

import pytest
import torch

from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.native import write_weights
from raymega.data.arrow import token_dtype
from raymega.data.format import META_FILE, DatasetMeta, SourceMeta, SplitMeta, encode_meta
from raymega.data.tokenizer_files import keep_tokenizer
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.plan.tensor_table import model_tensors
from raymega.prepare.groups import make_groups
from raymega.prepare.shards import write_group
from raymega.prepare.sources import list_files
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.storage.local import LocalStore
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import make_test_plan
from tests.support.ranks import run_grid
from tests.unit.prepare.tokenizer.files import write_llama3_like

pytestmark = pytest.mark.dist

STEPS = 80
# Token 2 of a trained BPE is the quotation mark, and 2 is the end by default in a Llama's config.json.
DOCUMENT = 'He says "yes" and "no".'
NOW = "2025-01-01T00:00:00+00:00"


def _prepare(tmp_path, name, **options):
    """A dataset of one document many times over, as the command writes it."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f"{json.dumps({'text': DOCUMENT})}\n" * 200)
    choice = choose_tokenizer(TokenizerOptions(name=str(name), **options))
    made, folder = make_tokenizer(choice, [DOCUMENT]), tmp_path / "tokens"
    folder.mkdir()
    for file, content in made.files.items():
        (folder / file).write_bytes(content)
    (group,) = make_groups(list_files([str(corpus)], include=["*"], exclude=[]))
    part = write_group(group, folder=folder, valid_fraction=0.0, rules=made.rules).parts["train"]
    meta = DatasetMeta(
        recipe=choice.recipe, vocab_size=made.vocab_size, eod_id=made.rules.eod_id,
        dtype=token_dtype(made.vocab_size), valid_entropy=-1.0, tokenizer=made.meta,
        splits={"train": SplitMeta(shards=(part.shard,), num_text_bytes=part.num_text_bytes)},
        source=SourceMeta(inputs=("x",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0),
    )  # fmt: skip
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return folder, meta


def _trained(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state = TrainState()
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
    blocks = [block for block in parts.optimizer.blocks() if block.name.startswith("model/")]
    return outcome.loss, {block.name: block.values.numpy().copy() for block in blocks}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bpe", "begins"])
def test_exported_run_loads_and_stops_at_its_end_of_document(tmp_path, kind):
    import transformers  # here, or its rank would load it too

    # Prepare and train one rank.
    if kind == "bpe":
        data, meta = _prepare(tmp_path, "bpe:270")
    else:
        data, meta = _prepare(tmp_path, write_llama3_like(tmp_path / "theirs"), add_bos=True)
    plan = make_test_plan(
        f"data.path={data}", "model.vocab_size=300", "model.num_layers=2", "parallel.pp=1",
        "optimizer.lr=1e-2", f"run.steps={STEPS}", "precision.dtype=float32", "run.eval_samples=0",
    )  # fmt: skip
    ((loss, weights),) = run_grid(_trained, plan.grid, plan.to_json())
    assert loss < 1
    # The checkpoint of the run, then its folder of Hugging Face without the dataset.
    run, job = LocalStore(tmp_path / "run"), json.loads(plan.job.model_dump_json())
    keep_tokenizer(run, str(data))
    values = partial(lambda tensor: weights[f"model/{tensor.name}"])
    write_weights(run, model_tensors(plan.job.model), values, dtype="float32", job=job, created=NOW)
    data.rename(tmp_path / "moved")
    done = hf_export(run.uri, tmp_path / "back")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(done.files)
    # What transformers makes of it.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == meta.eod_id
    assert tokenizer.eos_token_id == meta.eod_id
    # A text begins as the documents do: by their first token, or after another one's end.
    prompt = torch.tensor([tokenizer("").input_ids or [tokenizer.bos_token_id]])
    made = model.generate(prompt, max_new_tokens=60, do_sample=False)[0]
    # Past the quotation marks, up to the end of the document.
    assert tokenizer.decode(made, skip_special_tokens=True).endswith('"yes" and "no".')
    assert made[-1] == meta.eod_id and len(made) < 60


def test_export_names_a_dataset_where_the_run_has_none(tmp_path):
    import transformers

    data, meta = _prepare(tmp_path, "bpe:270")
    plan = make_test_plan("model.vocab_size=300")
    run, job = LocalStore(tmp_path / "run"), json.loads(plan.job.model_dump_json())
    zeros = partial(lambda tensor: torch.zeros(tensor.shape).numpy())
    write_weights(run, model_tensors(plan.job.model), zeros, dtype="float32", job=job, created=NOW)
    # Built-in tokens: no token is special, whatever the architecture's defaults are.
    done = hf_export(run.uri, tmp_path / "bare")
    config = json.loads((tmp_path / "bare/config.json").read_text())
    assert (
        config["eos_token_id"] is config["bos_token_id"] is None and "no tokenizer" in done.notes[0]
    )
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bare").config.eos_token_id
        is None
    )
    done = hf_export(run.uri, tmp_path / "named", tokenizer=str(data))
    assert json.loads((tmp_path / "named/config.json").read_text())["eos_token_id"] == meta.eod_id
    assert done.notes == ()
