"""Planted mistakes: documents, batches and pipelines."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import BLENDED, DROPOUT, GPT2, PACKED, Mutation

BATCHES: tuple[Mutation, ...] = (
    Mutation(
        name="a dataset begins anew in each stage",
        file="data/blends/mixture.py",
        old="return dataset, self._before[stage][dataset] + count",
        new="return dataset, count",
        layout=Layout(dp=2),
        job=BLENDED,
    ),
    Mutation(
        name="the datasets of a blend have one another's weights",
        file="data/blends/mixture.py",
        old="        dataset = self._members[stage][source]",
        new="        dataset = self._members[stage][-1 - source]",
        layout=Layout(dp=2),
        job=BLENDED,
    ),
    Mutation(
        name="packed tokens see the documents before theirs",
        file="plan/cp_layout.py",
        old="        start = 0\n        for length in lengths:",
        new="        start = 0\n        for length in (sum(lengths),):",
        layout=Layout(dp=2),
        job=PACKED,
    ),
    Mutation(
        name="positions go on from one document to the next",
        file="data/rows.py",
        old="np.concatenate([np.arange(length, dtype=np.int64) for length in documents])",
        new="np.arange(sum(documents), dtype=np.int64)",
        layout=Layout(dp=2),
        job=PACKED + GPT2,
    ),
    Mutation(
        name="the last token of a document predicts",
        file="data/packing.py",
        old="        mask[at : at + len(words) - 1] = counted[1:]",
        new="        mask[at : at + held.length] = True",
        layout=Layout(dp=2),
        job=PACKED,
    ),
    Mutation(
        name="padding of documents predicts",
        file="data/packing.py",
        old="        mask[at : at + len(words) - 1] = counted[1:]",
        new="        mask[at : at + held.padded] = True",
        layout=Layout(cp=2),
        job=PACKED,
    ),
    Mutation(
        name="a pack's tokens are cut as by another number of ranks",
        file="data/dynamic_loader.py",
        old="        at = held_positions((row.documents,), context)",
        new="        at = held_positions((row.documents,), context).flip(1)",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED,
    ),
    Mutation(
        name="dropout in a pack goes by the place in the pack's document",
        file="data/dynamic_loader.py",
        old="row_positions=take(starts + positions),",
        new="row_positions=take(positions),",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED + DROPOUT,
    ),
    Mutation(
        name="what was made ahead is the first step again",
        file="data/prefetch.py",
        old="self._thread.submit(make, *key)",
        new="self._thread.submit(make, key[0], 0)",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED,
    ),
    Mutation(
        name="a weight gradient that was put off is forgotten",
        file="parallel/core/weight_grads.py",
        old="    for weight in list(terms):",
        new="    for weight in list(terms)[1:]:",
        layout=Layout(pp=2, schedule="zb_h1"),
    ),
    Mutation(
        name="products of a micro-batch overwrite those of the one before",
        file="parallel/core/weight_grads.py",
        old="term.add_to(total, is_first=is_first)",
        new="term.add_to(total, is_first=True)",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="ranks train on the same samples",
        file="plan/batch.py",
        old="start = (micro_batch * self.dp + dp_rank) * self.micro_batch_size",
        new="start = micro_batch * self.dp * self.micro_batch_size",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="slots without a sample count",
        file="data/loader.py",
        old="mask = take([row.mask for row in rows]).float()",
        new="mask = take([row.mask for row in rows]).float().fill_(1.0)",
        layout=Layout(dp=4),
    ),
    Mutation(
        name="only the last micro-batch's loss counts",
        file="pipeline/executor.py",
        old="            self.loss_sum += output.detach()",
        new="            self.loss_sum = output.detach()",
        layout=Layout(pp=2),
    ),
)
