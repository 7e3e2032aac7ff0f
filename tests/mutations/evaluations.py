"""Planted mistakes of evaluation: what it reads, what it counts, and which loss it is."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import LATENT, LOSSES, PACKED, TASKS, Mutation

EVALUATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="evaluation keeps label smoothing and z-loss",
        file="model/layers/lm_head.py",
        old="terms = self.training_terms if self.training else self.plain_terms",
        new="terms = self.training_terms",
        layout=Layout(dp=2),
        job=LOSSES,
    ),
    Mutation(
        name="evaluation reads the training split",
        file="data/samples.py",
        old='_open(Mixture(job.data.blends[:1]), "valid", job, known)',
        new='_open(Mixture(job.data.blends[:1]), "train", job, known)',
        layout=Layout(dp=2),
    ),
    Mutation(
        name="every data-parallel rank evaluates rank 0's samples",
        file="train/forward_backward.py",
        old="loader.micro_batches(batch, 0)",
        new="(setattr(loader, '_dp_rank', 0) or loader.micro_batches(batch, 0))",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="evaluation counts padding",
        file="train/forward_backward.py",
        old="    tokens = float(sum(batch.divisor for batch in micro_batches))\n    mine = [float(loss_sum), tokens]",
        new="    tokens = float(sum(batch.mask.numel() for batch in micro_batches))\n    mine = [float(loss_sum), tokens]",
        layout=Layout(dp=2),
        job=("run.eval_samples=7",),  # odd: one rank has a masked slot
    ),
    Mutation(
        name="evaluation with fp8 counts padding",
        file="train/forward_backward.py",
        old="    tokens = float(sum(batch.divisor for batch in micro_batches))\n    mine = [float(loss_sum), tokens]",
        new="    tokens = float(sum(batch.mask.numel() for batch in micro_batches))\n    mine = [float(loss_sum), tokens]",
        layout=Layout(dp=2),
        job=("run.eval_samples=7", "precision.fp8=rowwise", "precision.fp8_end_blocks=0"),
    ),
    Mutation(
        name="evaluation forgets the borders of documents",
        file="model/pipeline_stage.py",
        old="            b = micro_batch\n"
        "            return self(*parts, hidden, rows=b.rows, encoder=b.encoder, beside=b.pairs)",
        new="            b = micro_batch\n"
        "            whole = b.rows._replace(documents=((sum(b.rows.documents[0]),),))\n"
        "            return self(*parts, hidden, rows=whole, encoder=b.encoder, beside=b.pairs)",
        layout=Layout(dp=2),
        job=PACKED,
    ),
    Mutation(
        name="evaluation counts the loss on every tensor-parallel rank, the tokens once",
        file="train/forward_backward.py",
        old="    mine = [float(loss_sum), tokens] if is_counted else [0.0, 0.0]",
        new="    mine = [float(loss_sum), tokens if is_counted else 0.0]",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="evaluation of a model with multi-token prediction leaves out the final norm",
        file="model/pipeline_stage.py",
        old="            return self._used(self.head, self.head.loss_sum(x, labels, mask))",
        new="            plain = self.head.loss_sum if self.mtp is None else self.head.loss_sum_after_norm\n"
        "            return self._used(self.head, plain(x, labels, mask))",
        layout=Layout(dp=2),
        job=LATENT,
    ),
    Mutation(
        name="evaluation keeps dropout",
        file="model/pipeline_stage.py",
        old="        self.eval()\n        try:\n            parts = micro_batch.tokens, micro_batch.labels, micro_batch.mask\n"
        "            b = micro_batch\n"
        "            return self(*parts, hidden, rows=b.rows, encoder=b.encoder, beside=b.pairs)",
        new="        try:\n            parts = micro_batch.tokens, micro_batch.labels, micro_batch.mask\n"
        "            b = micro_batch\n"
        "            return self(*parts, hidden, b.samples, rows=b.rows, encoder=b.encoder, beside=b.pairs)",
        layout=Layout(dp=2),
        job=("model.hidden_dropout=0.1",),
    ),
    Mutation(
        name="evaluation with dynamic cp is of other samples than the run's first",
        file="train/forward_backward.py",
        old="loader.micro_batches(batch, 0)",
        new="loader.micro_batches(batch, 1)",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED,
    ),
    Mutation(
        name="every data-parallel rank scores rank 0's rows of a task",
        file="evaluate/worker.py",
        old="dp_rank=plan.grid.coords(rank).dp",
        new="dp_rank=0",
        layout=Layout(dp=2),
        job=TASKS,
    ),
    Mutation(
        name="requests of a task that share a row see each other",
        file="evaluate/requests.py",
        old="            documents=tuple([*documents, rest] if rest else documents),",
        new="            documents=(self.seq_len,),",
        layout=Layout(pp=2),
        job=TASKS,
    ),
    Mutation(
        name="workers beside a run leave one tensor of its checkpoint out",
        file="train/build_scorer.py",
        old="        blocks,\n        is_narrowing_allowed=True,",
        new="        blocks[:-1],\n        is_narrowing_allowed=True,",
        layout=Layout(dp=2, eval_tasks_on="beside", eval_tasks_grid="tp=2"),
        job=TASKS,
    ),
)
