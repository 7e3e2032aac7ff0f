"""Planted mistakes in heads without a vocabulary, and in KTO's estimate on a whole batch."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import Mutation
from tests.mutations.preference import PAIRS

ROWS = (
    "data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8", "data.seq_len=64",
    "model.max_positions=64", "run.eval_samples=4",
)  # fmt: skip
LAST = (*ROWS, "model.head={kind: sequence_classification, num_labels: 3}")
MEAN = (*ROWS, "model.head={kind: regression, pooling: mean}")
TOKENS = (*ROWS, "model.head={kind: token_classification, num_labels: 3}")
REWARD = (*PAIRS, "model.head.kind=reward", "preference.loss_type=bradley_terry")
EMBEDDING = (*ROWS, "model.head={kind: embedding, pooling: mean}")
KTO = (*PAIRS, "preference.loss_type=kto", "model.lora={r: 4}", "optimizer.lr=0.05")
OBJECTIVE, HEAD, DATA = (
    "model/heads/objective.py",
    "model/heads/score_head.py",
    "data/heads/score_batch.py",
)
CACHE = "train/forward_only.py"
HEADS: tuple[Mutation, ...] = (
    Mutation(
        name="a rank's embeddings have the negatives of its own samples alone",
        file=CACHE,
        old="whole, first = _gather_rows(torch.cat(found), dp)",
        new="whole, first = torch.cat(found), 0",
        layout=Layout(dp=2),
        job=EMBEDDING,
    ),
    Mutation(
        name="each micro-batch takes the derivatives of the first one",
        file=CACHE,
        old="            first = last\n",
        new="            first = last - len(states)\n",
        layout=Layout(),
        job=(*EMBEDDING, "schedule.micro_batch_size=1"),
    ),
    Mutation(
        name="every data-parallel rank takes the derivatives of the first one",
        file=CACHE,
        old="return whole, sum(counts[: group.index])",
        new="return whole, 0",
        layout=Layout(dp=2),
        job=EMBEDDING,
    ),
    Mutation(
        name="a document's embedding is that of the tokens of one context-parallel rank",
        file=CACHE,
        old="    return sum_over_context(module.head.document_sums(x, scored), context)\n",
        new="    return module.head.document_sums(x, scored)\n",
        layout=Layout(cp=2),
        job=EMBEDDING,
    ),
    Mutation(
        name="every context-parallel rank counts the contrast of a pair",
        file=OBJECTIVE,
        old="    total = scored.contrast.losses.sum() * counts\n",
        new="    total = scored.contrast.losses.sum()\n",
        layout=Layout(cp=2),
        job=EMBEDDING,
    ),
    Mutation(
        name="the temperature is forgotten",
        file="model/heads/contrastive.py",
        old="anchors @ positives.T / head.temperature",
        new="anchors @ positives.T",
        layout=Layout(),
        job=EMBEDDING,
    ),
    Mutation(
        name="no gradient passes the normalisation",
        file="model/heads/contrastive.py",
        old="normalize(sums, dim=-1) if head.normalize",
        new="sums / sums.detach().norm(dim=-1, keepdim=True) if head.normalize",
        layout=Layout(),
        job=EMBEDDING,
    ),
    Mutation(
        name="each context-parallel rank takes the loss of the scores of its own part of a document",
        file=OBJECTIVE,
        old="    whole = sum_over_context(own, context).requires_grad_()\n",
        new="    whole = own.detach().clone().requires_grad_()\n",
        layout=Layout(cp=2),
        job=LAST,
    ),
    Mutation(
        name="every context-parallel rank counts the loss of a document",
        file=OBJECTIVE,
        old="    total = loss.detach() * is_first\n",
        new="    total = loss.detach()\n",
        layout=Layout(cp=2),
        job=LAST,
    ),
    Mutation(
        name="the mean over a document is that over each rank's part of it",
        file=DATA,
        old="            weight = 1.0 / len(found)\n            found = found[found >= 0]\n",
        new="            found = found[found >= 0]\n            weight = 1.0 / max(1, len(found))\n",
        layout=Layout(cp=2),
        job=MEAN,
    ),
    Mutation(
        name="a sequence-parallel rank reads its own positions as if they were the first",
        file=HEAD,
        old="            place = place - len(states) * self.sp.tp.index\n",
        new="",
        layout=Layout(tp=2, sequence_parallel=True),
        job=LAST,
    ),
    Mutation(
        name="the loss of tokens with classes is that of one sequence-parallel rank",
        file=OBJECTIVE,
        old="    sums = reduce_from_tp(sums, sp.tp) if sp.degree > 1 else sums\n",
        new="",
        layout=Layout(tp=2, sequence_parallel=True),
        job=TOKENS,
    ),
    Mutation(
        name="chosen and rejected scores are swapped on later context-parallel ranks",
        file=OBJECTIVE,
        old="    is_first = float(context.index == 0)\n",
        new="    is_first = float(context.index == 0)\n    slope = slope.view(-1, 2).flip(1).view_as(slope) if context.index else slope\n",
        layout=Layout(cp=2),
        job=REWARD,
    ),
    Mutation(
        name="the loss of documents is divided by tokens",
        file="train/step.py",
        old="factor = factor / totals.divisor / scale",
        new="factor = factor / totals.tokens / scale",
        layout=Layout(cp=2),
        job=(*REWARD, "optimizer.max_grad_norm=0"),
    ),
    Mutation(
        name="KTO's divergence is that of the rank's own answers",
        file="train/forward_only.py",
        old="        total = all_reduce(sums * float(first and tp_rank == 0), world)\n",
        new="        total = sums * float(first and tp_rank == 0)\n",
        layout=Layout(dp=2),
        job=KTO,
    ),
)
