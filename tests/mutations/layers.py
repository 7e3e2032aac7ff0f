"""Planted mistakes: cut layers, latents, context parallelism."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import DROPOUT, GPT2, LATENT, LOSSES, Mutation

LAYERS: tuple[Mutation, ...] = (
    Mutation(
        name="gradient of a column layer's input is not summed",
        file="parallel/tensor_parallel/layers.py",
        old="        grad_x, summing = ctx.sp.start_sum(product(grad, weight))",
        new="        grad_x = product(grad, weight)\n"
        "        _, summing = ctx.sp.start_sum(grad_x.clone())",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="every rank adds a row layer's bias",
        file="parallel/tensor_parallel/layers.py",
        old="        y, summing = sp.start_sum(project(x, weight, None))\n"
        "        summing.wait(sp.tp.timeout_s)\n"
        "        return y if bias is None else y.add_(bias)",
        new="        y, summing = sp.start_sum(linear(x, weight, bias))\n"
        "        summing.wait(sp.tp.timeout_s)\n"
        "        return y",
        layout=Layout(tp=2),
        job=GPT2,
    ),
    Mutation(
        name="a small layer that no rank shares has no bias",
        file="parallel/tensor_parallel/layers.py",
        old="        return linear(x, weight, bias)\n    return _Linear",
        new="        return linear(x, weight)\n    return _Linear",
        layout=Layout(pp=2),
        job=GPT2,
    ),
    Mutation(
        name="positions start at zero on every rank",
        file="model/layers/embedding.py",
        old="embedding(self.sp.own(positions), self.positions)",
        new="embedding(positions[: x.shape[0]], self.positions)",
        layout=Layout(tp=2, sequence_parallel=True),
        job=GPT2,
    ),
    Mutation(
        name="cross entropy takes the peak of its own columns",
        file="parallel/tensor_parallel/cross_entropy.py",
        old='all_reduce(own_peak.clone(), tp, op="max")',
        new="own_peak",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="smoothing is spread over the rank's own columns",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="mean = (total + num_real * lift) / terms.vocab_size",
        new="mean = (total + num_real * lift) / logits.shape[-1]",
        layout=Layout(tp=2),
        job=LOSSES,
    ),
    Mutation(
        name="z-loss takes the rank's own sum of exponentials",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="_z_factor(log_sum_exp, terms) / sum_exp * scale",
        new="_z_factor(log_sum_exp - torch.tensor(float(tp.size)).log(), terms) / sum_exp * scale",
        layout=Layout(tp=2),
        job=LOSSES,
    ),
    Mutation(
        name="every rank masks the padding of the last one",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="return min(max(vocab_size - num_columns * tp.index, 0), num_columns)",
        new="return num_columns - (-vocab_size) % num_columns",
        layout=Layout(tp=4),
        job=LOSSES,
    ),
    Mutation(
        name="padded columns of the vocabulary take probability",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="    return min(max(vocab_size - num_columns * tp.index, 0), num_columns)",
        new="    return num_columns",
        layout=Layout(tp=2),
        job=("model.vocab_size=300",),
    ),
    Mutation(
        name="dropout is keyed by the slot in the micro-batch",
        file="parallel/core/dropout.py",
        old="    sample, position = torch.broadcast_tensors(samples, positions)",
        new="    samples = torch.arange(samples.numel())\n"
        "    sample, position = torch.broadcast_tensors(samples, positions)",
        layout=Layout(dp=2),
        job=DROPOUT,
    ),
    Mutation(
        name="attention dropout numbers heads from zero on every rank",
        file="model/attention/core_attention.py",
        old="        first = factory.tp.index * num_heads",
        new="        first = 0",
        layout=Layout(tp=2),
        job=("model.attention_dropout=0.1",),
    ),
    Mutation(
        name="attention dropout numbers heads from zero on every rank that exchanges them",
        file="model/attention/core_attention.py",
        old="        first = token_layout.context.inner.index * q.shape[2]",
        new="        first = 0",
        layout=Layout(cp=2, cp_method="all_to_all"),
        job=("model.attention_dropout=0.1",),
    ),
    Mutation(
        name="ranks hold chunks one after another where attention takes them for zigzag",
        file="plan/cp_layout.py",
        old="for chunk in (cp_rank, 2 * cp - 1 - cp_rank))",
        new="for chunk in (2 * cp_rank, 2 * cp_rank + 1))",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="outputs over different keys are added without a new scale",
        file="parallel/context_parallel/attention_blocks.py",
        old="    into.out.mul_((into.log_sum_exp - finite).exp_().unsqueeze(-1))\n",
        new="",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="labels are moved on by one after the row is cut",
        file="data/loader.py",
        old="labels=take([row.labels for row in rows]),",
        new="labels=take([row.tokens for row in rows]).roll(-1, 1),",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="each context-parallel rank divides by its own tokens",
        file="train/step.py",
        old="        tokens=total[2],",
        new="        tokens=float(mine[2]) * parts.plan.grid.dp or total[2],",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="RoPE counts from zero on every context-parallel rank",
        file="model/attention/rope.py",
        old="return self.cos[positions, 0], self.sin[positions, 0]",
        new="positions = positions - positions[:1]\n"
        "        return self.cos[positions, 0], self.sin[positions, 0]",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="gradients are summed over dp only",
        file="train/build_model.py",
        old="Sharing(whole=groups.replicas, inside=",
        new="Sharing(whole=groups.dp, inside=",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="gradients by keys stay where they are on the ring",
        file="parallel/context_parallel/attention.py",
        old="coming = start_pass(grad_kv, ring, work.log, by=-1)",
        new="coming = start_pass(grad_kv, ring, work.log, by=1)",
        layout=Layout(cp=4),
    ),
    Mutation(
        name="gathered keys of late chunks are taken in the ranks' order",
        file="parallel/context_parallel/attention.py",
        old="(2 * num_ranks - 1 - rank, segment.late)",
        new="(num_ranks + rank, segment.late)",
        layout=Layout(cp=4, cp_method="all_gather"),
    ),
    Mutation(
        name="exchanged heads come back in the order of the sequence",
        file="parallel/context_parallel/ulysses.py",
        old="_reorder(y, back, there)",
        new="_reorder(y, there, back)",
        layout=Layout(cp=4, cp_method="all_to_all"),
    ),
    Mutation(
        name="dropout counts positions from zero on every context-parallel rank",
        file="data/loader.py",
        old="row_positions=held)",
        new="row_positions=held - held[:, :1])",
        layout=Layout(cp=2),
        job=DROPOUT,
    ),
    Mutation(
        name="gradients of the keys that all heads share are not summed",
        file="model/attention/latent_attention.py",
        old="        k_turned = self.sp.enter(k_turned)\n",
        new="",
        layout=Layout(tp=2),
        job=LATENT,
    ),
    Mutation(
        name="the token table that looks further ahead sums no gradients with the first stage",
        file="model/pipeline_stage.py",
        old="is_copied = model.needs_token_table_last and",
        new="is_copied = model.tie_word_embeddings and",
        layout=Layout(pp=2),
        job=LATENT,
    ),
    Mutation(
        name="labels further ahead are moved on inside a context-parallel rank's chunks",
        file="data/loader.py",
        old="return torch.stack([*map(take, by_depth)]), ",
        new="return take([row.labels for row in rows]).roll(-1, 1)[None], ",
        layout=Layout(cp=2),
        job=LATENT,
    ),
)
