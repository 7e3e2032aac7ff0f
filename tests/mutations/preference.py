"""Planted mistakes in training on pairs of answers."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import Mutation

PAIRS = (
    "data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8", "data.seq_len=64",
    "model.max_positions=64", "run.eval_samples=4", "data.loss_on=all",
)  # fmt: skip
DPO = (
    *PAIRS,
    "preference.loss_type=sigmoid",
    "preference.beta=0.5",
    "model.lora={r: 4, lora_dropout: 0.1}",
)
ORPO = (*PAIRS, "preference.loss_type=orpo")
HEAD, DATA, TRAIN = "model/preference.py", "data/preference/pair_batch.py", "train/forward_only.py"
PREFERENCE: tuple[Mutation, ...] = (
    Mutation(
        name="each context-parallel rank takes the loss of its own part of an answer",
        file=HEAD,
        old="return all_reduce(all_reduce(own.detach().clone(), context.inner), context.outer)",
        new="return own.detach().clone()",
        layout=Layout(cp=2),
        job=ORPO,
    ),
    Mutation(
        name="every context-parallel rank counts the loss of a pair",
        file=HEAD,
        old="    total = loss.detach() * is_first\n",
        new="    total = loss.detach()\n",
        layout=Layout(cp=2),
        job=ORPO,
    ),
    Mutation(
        name="every context-parallel rank counts the pairs",
        file=DATA,
        old="int(is_counted.sum()) if context.index == 0 else 0",
        new="int(is_counted.sum())",
        layout=Layout(cp=2),
        job=ORPO,
    ),
    Mutation(
        name="chosen and rejected are swapped on later context-parallel ranks",
        file=HEAD,
        old="    is_first = float(context.index == 0)\n",
        new="    is_first = float(context.index == 0)\n    slope = slope.view(-1, 2).flip(1).flatten() if context.index else slope\n",
        layout=Layout(cp=2),
        job=ORPO,
    ),
    Mutation(
        name="an answer's number of labels is that of this rank's part",
        file=DATA,
        old="        counts=by_pair.flatten(),\n",
        new="        counts=(by_pair / context.degree).flatten(),\n",
        layout=Layout(cp=2),
        job=ORPO,
    ),
    Mutation(
        name="the loss is the mean of the means of micro-batches",
        file=HEAD,
        old="        loss = (by_pair * pairs.is_counted).sum()\n",
        new="        loss = (by_pair * pairs.is_counted).sum() / pairs.is_counted.sum() * 2\n",
        layout=Layout(dp=2),
        job=(*ORPO, "schedule.micro_batch_size=1"),
    ),
    Mutation(
        name="the loss of pairs is divided by labels",
        file="train/step.py",
        old="factor = factor / totals.divisor / scale",
        new="factor = factor / totals.tokens / scale",
        layout=Layout(cp=2),
        job=(*ORPO, "optimizer.max_grad_norm=0"),
    ),
    Mutation(
        name="the reference has the adapters",
        file=TRAIN,
        old="        module.adapters.is_off = True\n",
        new="        module.adapters.is_off = module.context.degree == 1\n",
        layout=Layout(cp=2),
        job=DPO,
    ),
    Mutation(
        name="the reference is that of the rank's own part of an answer",
        file=TRAIN,
        old="return sum_over_context(own_log_probs(losses, micro_batch.mask, pairs), context)",
        new="return own_log_probs(losses, micro_batch.mask, pairs)",
        layout=Layout(cp=2),
        job=DPO,
    ),
    Mutation(
        name="the reference of a micro-batch is that of the first one",
        file=TRAIN,
        old="        with _without_adapters(forward.modules):\n            found: list[Tensor] = forward.run(answer_log_probs, micro_batches)\n",
        new="        with _without_adapters(forward.modules):\n            found: list[Tensor] = forward.run(answer_log_probs, micro_batches)\n"
        "        found = [found[0] if len(found[0]) == len(f) and forward.modules[0].context.degree > 1 else f for f in found]\n",
        layout=Layout(cp=2),
        job=DPO,
    ),
    Mutation(
        name="the reference pass leaves the adapters off",
        file=TRAIN,
        old="        for module in modules:\n            module.adapters.is_off = False\n",
        new="        for module in modules[1:]:\n            module.adapters.is_off = False\n",
        layout=Layout(pp=2),
        job=DPO,
    ),
)
