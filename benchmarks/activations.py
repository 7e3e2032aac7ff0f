"""Bytes that autograd keeps for one block of one micro-batch, counted, in units of S*B*D.

python benchmarks/activations.py [S] [B] [D] [heads]
"""

import sys

import torch

from raymega.config.schema import MemorySection, ModelSection
from raymega.model.saved_bytes import SavedBytes
from raymega.model.stage import StageModule
from raymega.parallel.groups import Group
from raymega.parallel.stream import Stream
from raymega.plan.stages import make_stages

MEMORIES = {
    "none": MemorySection(),
    "attention": MemorySection(recompute="selective"),
    "attention, activation, norm": MemorySection(
        recompute="selective", recompute_parts=("attention", "activation", "norm")
    ),
    "full": MemorySection(recompute="full"),
}
MODELS = {
    "gpt2": {"family": "gpt2"},
    "gpt2, dropout": {"family": "gpt2", "residual_dropout": 0.1},
    "gpt2, dropout, attention dropout": {
        "family": "gpt2",
        "residual_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "llama": {"family": "llama"},
}
CPU = torch.device("cpu")


def kept_bytes(model: ModelSection, memory: MemorySection, seq_len: int, batch: int) -> int:
    """What a block in the middle of the model keeps, in bf16 on one rank."""
    alone = Group(name="tp", ranks=(0,), index=0, timeout_s=60, handle=None)
    _, stage, _ = make_stages((1, 1, 1))
    module = StageModule(
        model, stage, stream=Stream(tp=alone), dtype=torch.bfloat16, device=CPU, seed=1
    )
    module.recompute(memory)
    tokens, samples = torch.zeros(batch, seq_len, dtype=torch.int64), torch.arange(batch)
    hidden = torch.randn(seq_len, batch, model.width).bfloat16().requires_grad_()
    with SavedBytes([*module.parameters(), *module.buffers()]) as kept:
        module(tokens, tokens, tokens, hidden, samples)
    return kept.total


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]]
    seq_len, batch, width, heads = (*sizes, *(256, 2, 128, 8)[len(sizes) :])
    print(f"S={seq_len} B={batch} D={width} H={heads} F={4 * width}, bf16, one rank")
    print(f"{'model':34}{'recomputed':30}{'sbh':>8}{'bytes':>12}")
    for name, options in MODELS.items():
        model = ModelSection(
            num_layers=3, width=width, num_heads=heads, ffn_width=4 * width, vocab_size=256,
            max_positions=seq_len, **options,
        )  # fmt: skip
        for recomputed, memory in MEMORIES.items():
            kept = kept_bytes(model, memory, seq_len, batch)
            print(f"{name:34}{recomputed:30}{kept / (seq_len * batch * width):8.2f}{kept:12,}")


if __name__ == "__main__":
    main()
