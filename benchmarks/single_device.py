"""Training step of raymega on one rank against transformers with torch.optim.AdamW(fused).

Both read the same tokens in the same micro-batches, clip to a global norm of 1, decay matrices only
and keep no dropout. bfloat16 is three pairings: we keep bfloat16 weights with float32 masters; they run
float32 weights under autocast, or bfloat16 weights, moments and all, which rounds small updates away.

    python -m benchmarks.single_device [--quick] [--threads 2] [--compile] [--only gpt2-float32]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch

from benchmarks.measure import interleave, report, set_threads
from benchmarks.one_rank import OneRank, make_one_rank_plan
from raymega.plan.memory.state_bytes import count_parameters

LAYERS, WIDTH, HEADS, VOCAB, SEQ_LEN = 6, 320, 5, 8192, 256
QUICK = {"LAYERS": 2, "WIDTH": 128, "HEADS": 4, "VOCAB": 1024, "SEQ_LEN": 128}
PAIRINGS = (
    ("gpt2", "float32", "float32"),
    ("llama", "float32", "float32"),
    ("gpt2", "bfloat16", "autocast"),
    ("llama", "bfloat16", "autocast"),
    ("gpt2", "bfloat16", "bfloat16"),
    ("llama", "bfloat16", "bfloat16"),
)


class Theirs:
    """The loop that anyone would write around a transformers model."""

    def __init__(self, model, ours: OneRank, mode: str, *, is_compiled: bool) -> None:
        self.model = model.train().to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
        self.ours, self.mode, self.samples = ours, mode, 0
        self.call = torch.compile(self.model) if is_compiled else self.model
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def __call__(self) -> float:
        parts = self.ours.parts
        batch = parts.plan.batch
        micro_batches = parts.loader.micro_batches(batch, self.samples)
        self.samples += batch.global_batch_size
        total = 0.0
        for micro in micro_batches:
            # the same micro-batches from our loader, with labels shifted inside transformers
            is_autocast = self.mode == "autocast"
            with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
                loss = self.call(input_ids=micro.tokens, labels=micro.tokens).loss
            (loss / len(micro_batches)).backward()
            total += float(loss.detach()) / len(micro_batches)
        # as ours does: clip, update, drop the gradients
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def make_gpt2() -> torch.nn.Module:
    # here, as --help needs no transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=SEQ_LEN, vocab_size=VOCAB,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_llama() -> torch.nn.Module:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        intermediate_size=8 * WIDTH // 3 // 16 * 16, max_position_embeddings=SEQ_LEN,
        vocab_size=VOCAB, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def our_model(family: str) -> dict[str, object]:
    ffn = 4 * WIDTH if family == "gpt2" else 8 * WIDTH // 3 // 16 * 16
    return {
        "family": family, "num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS,
        "ffn_hidden_size": ffn, "vocab_size": VOCAB,
    }  # fmt: skip


def compare(family: str, dtype: str, mode: str, options: argparse.Namespace) -> dict[str, object]:
    plan = make_one_rank_plan(
        our_model(family), seq_len=SEQ_LEN, batch=options.batch, micro_batch=options.micro_batch,
        dtype=dtype, kernels="compile" if options.compile else "eager",
    )  # fmt: skip
    ours = OneRank(plan)
    model = make_gpt2() if family == "gpt2" else make_llama()
    theirs = Theirs(model, ours, mode, is_compiled=options.compile)
    numbers = sum(p.numel() for p in model.parameters()), count_parameters(plan.job.model)
    assert numbers[0] == numbers[1], f"their model has {numbers[0]} parameters, ours {numbers[1]}"
    pairs = interleave(ours, theirs, rounds=options.rounds)
    # the figure that papers print: tokens of a step over its seconds
    tokens = options.batch * SEQ_LEN
    return report(
        f"{family} {dtype} vs {mode}", pairs, parameters=numbers[1], threads=options.threads,
        tokens_per_step=tokens, is_compiled=options.compile,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small shape and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="their model through torch.compile, ours with run.kernels=compile",
    )
    parser.add_argument("--only", default="", help="pairings whose name begins so: gpt2-float32")
    options = parser.parse_args()
    options.rounds = options.rounds or (7 if options.quick else 25)
    if options.quick:
        globals().update(QUICK)
    set_threads(options.threads)
    for family, dtype, mode in PAIRINGS:
        if f"{family}-{dtype}-{mode}".startswith(options.only):
            compare(family, dtype, mode, options)


if __name__ == "__main__":
    main()
