"""A tiny LLaVA from scratch on Fashion-MNIST: captions of 60,000 pictures, and the names it gives to held-out ones.

The pictures are those of Debian's package dataset-fashion-mnist. From the repository's root:

    python -m benchmarks.fashion_mnist /usr/share/datasets/fashion-mnist /tmp/fashion --steps 300
"""

from __future__ import annotations

import argparse
import gzip
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

NAMES = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")  # fmt: skip
EDGE, PATCHES, END, TOKEN = 28, 16, 256, 257
MEAN, STD = 0.286, 0.353
HELD_OUT, AT_ONCE = 2000, 500
JOB = f"""
run: {{name: fashion, steps: STEPS, seed: 1, eval_samples: 64, eval_every: 100}}
model:
  family: llama
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  ffn_hidden_size: 128
  vocab_size: 258
  max_positions: 128
  tie_word_embeddings: false
  vision: {{kind: clip, image_size: {EDGE}, patch_size: 7, num_layers: 3, hidden_size: 64, num_heads: 4, ffn_hidden_size: 128,
    feature_layer: -1, image_token_id: {TOKEN}, image_mean: [{MEAN}, {MEAN}, {MEAN}], image_std: [{STD}, {STD}, {STD}]}}
data: {{path: OUT/tokens, seq_len: 128, global_batch_size: 32, packing: best_fit, packing_window: 512}}
schedule: {{micro_batch_size: 32}}
optimizer: {{lr: 3e-3, lr_warmup_steps: 20}}
precision: {{dtype: float32}}
checkpoint: {{every: 50, uri: OUT/runs}}
tracking: {{mlflow_uri: "off"}}
cluster: {{device: cpu, cpus_per_worker: 1}}
"""


def read_split(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures [N, 28, 28] uint8 and classes [N] uint8 of a split."""
    # IDX files: 16 bytes before pictures, 8 before labels
    pictures = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())
    classes = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    shaped = np.frombuffer(pictures, np.uint8, offset=16).reshape(-1, EDGE, EDGE)
    return shaped, np.frombuffer(classes, np.uint8, offset=8)


def write_captions(folder: Path, out: Path) -> None:
    """Write rows of a mark, an image and its class's name as Parquet."""
    pictures, classes = read_split(folder, "train")
    files = []
    for picture in pictures:
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, "PNG")
        files.append([stream.getvalue()])
    columns = {
        "images": pa.array(files, pa.list_(pa.binary())),
        "prompt": ["<image>"] * len(files),
        "text": [NAMES[number] for number in classes],
    }
    pq.write_table(pa.table(columns), out / "captions.parquet", row_group_size=2500)


def right_names(model: torch.nn.Module, folder: Path) -> float:
    """Return the share of held-out pictures whose name the model writes, greedily, from the image alone."""
    pictures, classes = read_split(folder, "t10k")
    tokens, right = torch.full((AT_ONCE, PATCHES), TOKEN), 0
    for first in range(0, HELD_OUT, AT_ONCE):
        shown = torch.from_numpy(pictures[first : first + AT_ONCE].copy())[:, None].float()
        pixels = ((shown / 255 - MEAN) / STD).expand(-1, 3, -1, -1)
        written = model.generate(
            input_ids=tokens, pixel_values=pixels, attention_mask=torch.ones_like(tokens), max_new_tokens=10,
            do_sample=False, eos_token_id=END, pad_token_id=END,
        )[:, PATCHES:]  # fmt: skip
        for row, number in zip(written.tolist(), classes[first : first + AT_ONCE], strict=True):
            text = bytes(token for token in row if token < END).decode(errors="replace")
            right += text == NAMES[number]
    return right / HELD_OUT


def main() -> None:
    """Prepare, train, export, and let transformers name pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "raymega"]

    def run(*words: str) -> None:
        subprocess.run([*command, *words], check=True)

    # captions, their tokens and pixels, a run, its export
    captions, out = given.out / "captions.parquet", str(given.out)
    if not captions.exists():
        write_captions(given.dataset, given.out)
    options = (
        "--format",
        "images",
        "--image-size",
        str(EDGE),
        "--patch-size",
        "7",
        "--valid-fraction",
        "0.01",
    )
    run("data", "prepare", str(captions), "--out", f"{out}/tokens", "--tokenizer", "bytes", *options)  # fmt: skip
    job = given.out / "fashion.yaml"
    job.write_text(JOB.replace("OUT", out).replace("STEPS", str(given.steps)))
    run("train", str(job))
    run("convert", "hf-export", f"{out}/runs/fashion", "--out", f"{out}/export")
    # here, as --help needs no transformers
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(f"{out}/export", dtype="auto").eval()
    print(f"right names: {right_names(model, given.dataset):.1%} of {HELD_OUT:,} held-out pictures")


if __name__ == "__main__":
    main()
