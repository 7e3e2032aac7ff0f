"""Planted mistakes: who counts and who sums, and which part of a whole a rank has."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import GPT2, TWO_KV_HEADS, Mutation

SUMS: tuple[Mutation, ...] = (
    Mutation(
        name="norm counts what tensor-parallel ranks share",
        file="parallel/core/shard_spec.py",
        old="is_primary=not is_tied_copy and tp_rank % sharers == 0,",
        new="is_primary=not is_tied_copy,",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="norm counts the tied copy",
        file="parallel/core/shard_spec.py",
        old="is_primary=not is_tied_copy and tp_rank % sharers == 0,",
        new="is_primary=tp_rank % sharers == 0,",
        layout=Layout(pp=2),
    ),
    Mutation(
        name="gradients of norms are not summed over positions of other ranks",
        file="parallel/core/shard_spec.py",
        old="                or (is_sequence_parallel and tensor.tp_dim < 0)\n",
        new="",
        layout=Layout(tp=2, sequence_parallel=True),
    ),
    Mutation(
        name="gradients of shared key and value heads are not summed",
        file="parallel/core/shard_spec.py",
        old="                tensor.serves_heads\n                or tensor.serves_tokens",
        new="                tensor.serves_tokens",
        layout=Layout(tp=4),
        job=TWO_KV_HEADS,
    ),
    Mutation(
        name="sums of shared pieces do not come back from the ranks that share them",
        file="parallel/data_parallel/grad_buffer.py",
        old="            mine.copy_(block)",
        new="            block.copy_(mine)",
        layout=Layout(tp=2, sequence_parallel=True),
    ),
    Mutation(
        name="layers of a stage are counted as if all stages had as many",
        file="plan/stages.py",
        old="range(self.first_layer, self.first_layer + self.num_layers)",
        new="range(self.index * self.num_layers, (self.index + 1) * self.num_layers)",
        layout=Layout(pp=3, stages="Et|tt|tL"),
        job=("model.num_layers=4",),
    ),
    Mutation(
        name="tied embedding is forgotten",
        file="parallel/data_parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if False:\n",
        layout=Layout(pp=2),
    ),
    Mutation(
        name="tied embedding is forgotten by the sharded optimizer",
        file="parallel/data_parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if bucket.is_tied and bucket.level == ZeroLevel.NONE:\n",
        layout=Layout(pp=2, dp=2, sharding="optimizer"),
    ),
    Mutation(
        name="gradients are not summed over data-parallel ranks",
        file="parallel/data_parallel/grad_buffer.py",
        old="pending = start_all_reduce(flat, sharing.whole)",
        new="pending = start_all_reduce(flat.clone(), sharing.whole)",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="ranks' gradients are averaged instead of summed",
        file="parallel/data_parallel/grad_buffer.py",
        old="pending = start_all_reduce(flat, sharing.whole)",
        new="pending = start_all_reduce(flat.div_(sharing.whole.size), sharing.whole)",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="each rank clips by the norm of its own part",
        file="train/step.py",
        old="        norm_sq=total[3],",
        new="        norm_sq=float(mine[3]),",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="loss is divided by the rank's own tokens",
        file="train/step.py",
        old="        divisor=total[2],",
        new="        divisor=float(mine[2]) or total[2],",
        layout=Layout(dp=4),
    ),
    Mutation(
        name="initial values are keyed by local indices",
        file="parallel/core/sharded_parameter.py",
        old="values = rng.normal(stream, box, tensor.shape, torch.float64, device=device)",
        new="values = rng.normal(stream, tensor.whole, tensor.shape, torch.float64, device=device)"
        "[: box.shape[0], : box.shape[1]].clone()",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="biases are cut in reverse order",
        file="plan/layers/global_tensor.py",
        old="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)",
        new="            at = (tp - 1 - tp_rank if len(shape) == 1 else tp_rank) // sharers\n"
        "            offset[self.tp_dim] = shape[self.tp_dim] * at",
        layout=Layout(tp=2),
        job=GPT2,
    ),
    Mutation(
        name="ranks take key and value heads in turn instead of next to one another",
        file="plan/layers/global_tensor.py",
        old="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)",
        new="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank % (tp // sharers))",
        layout=Layout(tp=4),
        job=TWO_KV_HEADS,
    ),
)
