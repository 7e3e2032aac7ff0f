"""Planted mistakes, each of which silently trains another run on some layout.

A row replaces one piece of the package's text; what catches it is the comparison with one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raymega.verify.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A mistake and the layout that shows it.

    Attributes:
        name: What is wrong.
        file: Path in the package.
        old: Text that stands in the file exactly once.
        new: What takes its place.
        layout: On which the run becomes another one.
        job: Overrides of jobs/verify.yaml that the mistake needs.
    """

    name: str
    file: str
    old: str
    new: str
    layout: Layout
    job: tuple[str, ...] = field(default=())


GPT2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=4")
DROPOUT = ("model.residual_dropout=0.1",)
TWO_KV_HEADS = ("model.num_kv_heads=2",)
EXPERTS = ("model.moe.num_experts=4", "model.moe.width=16")
BALANCED = (
    *EXPERTS, "model.moe.balance=micro_batch", "model.moe.balance_coefficient=0.1",
    "model.moe.capacity_factor=1.0",
)  # fmt: skip
BIASED = (*EXPERTS, "model.moe.score=sigmoid", "model.moe.has_bias=true", "model.moe.bias_rate=0.1")
LAST_LOAD = (*EXPERTS, "model.moe.balance=global", "model.moe.balance_coefficient=0.5")
DROPPED = (*EXPERTS, "model.moe.capacity_factor=0.5", "model.moe.drop_by=position")
LOSSES = ("model.vocab_size=70", "model.label_smoothing=0.1", "model.z_loss=1e-2")
LION = ("optimizer.name=lion", "optimizer.lr=1e-3")
EIGHT_BITS = ("optimizer.state_dtype=8bit",)
MUON = ("optimizer.name=muon", "model.num_kv_heads=2")
LATENT = (
    "model.num_kv_heads=num_heads", "model.is_embedding_tied=false", "model.mtp_depth=1",
    "model.mla={kv_rank: 8, q_rank: 6, nope_features: 4, rope_features: 2, value_features: 3}",
)  # fmt: skip

MUTATIONS: tuple[Mutation, ...] = (
    # Who counts, who sums.
    Mutation(
        name="norm counts what tensor-parallel ranks share",
        file="parallel/sharding.py",
        old="is_primary=not is_tied_copy and tp_rank % sharers == 0,",
        new="is_primary=not is_tied_copy,",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="norm counts the tied copy",
        file="parallel/sharding.py",
        old="is_primary=not is_tied_copy and tp_rank % sharers == 0,",
        new="is_primary=tp_rank % sharers == 0,",
        layout=Layout(pp=2),
    ),
    Mutation(
        name="gradients of norms are not summed over positions of other ranks",
        file="parallel/sharding.py",
        old="                or (is_sequence_parallel and tensor.tp_dim < 0)\n",
        new="",
        layout=Layout(tp=2, sequence_parallel=True),
    ),
    Mutation(
        name="gradients of shared key and value heads are not summed",
        file="parallel/sharding.py",
        old="                tensor.serves_heads\n                or tensor.serves_tokens",
        new="                tensor.serves_tokens",
        layout=Layout(tp=4),
        job=TWO_KV_HEADS,
    ),
    Mutation(
        name="sums of shared pieces do not come back from the ranks that share them",
        file="parallel/grad_buffer.py",
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
        file="parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if False:\n",
        layout=Layout(pp=2),
    ),
    Mutation(
        name="tied embedding is forgotten by the sharded optimizer",
        file="parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if bucket.is_tied and bucket.level == Level.NONE:\n",
        layout=Layout(pp=2, dp=2, sharding="optimizer"),
    ),
    Mutation(
        name="gradients are not summed over data-parallel ranks",
        file="parallel/grad_buffer.py",
        old="pending = start_all_reduce(flat, sharing.whole)",
        new="pending = start_all_reduce(flat.clone(), sharing.whole)",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="ranks' gradients are averaged instead of summed",
        file="parallel/grad_buffer.py",
        old="pending = start_all_reduce(flat, sharing.whole)",
        new="pending = start_all_reduce(flat.div_(sharing.whole.size), sharing.whole)",
        layout=Layout(dp=2),
    ),
    Mutation(
        name="each rank clips by the norm of its own part",
        file="train/step.py",
        old="        norm_sq=total[3],",
        new="        norm_sq=mine[3],",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="loss is divided by the rank's own tokens",
        file="train/step.py",
        old="        tokens=total[2],",
        new="        tokens=mine[2] or total[2],",
        layout=Layout(dp=4),
    ),
    # What is cut where.
    Mutation(
        name="initial values are keyed by local indices",
        file="parallel/parameter.py",
        old="values = rng.normal(stream, box, tensor.shape, torch.float64, device=device)",
        new="values = rng.normal(stream, tensor.whole, tensor.shape, torch.float64, device=device)"
        "[: box.shape[0], : box.shape[1]].clone()",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="biases are cut in reverse order",
        file="plan/tensors.py",
        old="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)",
        new="            at = (tp - 1 - tp_rank if len(shape) == 1 else tp_rank) // sharers\n"
        "            offset[self.tp_dim] = shape[self.tp_dim] * at",
        layout=Layout(tp=2),
        job=GPT2,
    ),
    Mutation(
        name="ranks take key and value heads in turn instead of next to one another",
        file="plan/tensors.py",
        old="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank // sharers)",
        new="            offset[self.tp_dim] = shape[self.tp_dim] * (tp_rank % (tp // sharers))",
        layout=Layout(tp=4),
        job=TWO_KV_HEADS,
    ),
    Mutation(
        name="sharded update leaves out the last element of each part",
        file="parallel/buckets.py",
        old="begin=size * inside.index, end=size * (inside.index + 1))",
        new="begin=size * inside.index, end=size * (inside.index + 1) - 1)",
        layout=Layout(dp=2, sharding="optimizer"),
    ),
    Mutation(
        name="updated weights are not gathered",
        file="parallel/weight_buffer.py",
        old="        if not self._is_old:\n            return\n",
        new="        self._is_old = False\n        if not self._is_old:\n            return\n",
        layout=Layout(dp=2, sharding="optimizer"),
    ),
    # Sharded gradients and weights, copies of hybrid sharding.
    Mutation(
        name="weights gathered before the update are used after it",
        file="parallel/weight_buffer.py",
        old="        self._free(keep=())\n",
        new="",
        layout=Layout(dp=2, sharding="parameters"),
    ),
    Mutation(
        name="weights are not gathered again for backward",
        file="parallel/weight_buffer.py",
        old="            _drop(self._flats[index])\n            self._whole.remove(index)\n",
        new="            self._flats[index].zero_()\n",
        layout=Layout(dp=2, sharding="parameters"),
    ),
    Mutation(
        name="a micro-batch's part of sharded gradients is added twice",
        file="parallel/grad_buffer.py",
        old="            self.owned(bucket).add_(mine)\n",
        new="            self.owned(bucket).add_(mine, alpha=2)\n",
        layout=Layout(dp=2, sharding="gradients"),
    ),
    Mutation(
        name="a micro-batch's part of sharded gradients takes the place of the sum",
        file="parallel/grad_buffer.py",
        old="            self._without_any.remove(bucket.index)\n",
        new="",
        layout=Layout(dp=2, sharding="gradients"),
    ),
    Mutation(
        name="gradients are not summed over the copies of hybrid sharding",
        file="parallel/grad_buffer.py",
        old="if bucket.level > Level.NONE and across.size > 1:",
        new="if False:",
        layout=Layout(dp=4, sharding="optimizer", sharding_group=2),
    ),
    Mutation(
        name="norm counts the same part of every copy",
        file="parallel/buckets.py",
        old="        begin += size * sharing.across.index\n",
        new="",
        layout=Layout(dp=4, sharding="gradients", sharding_group=2),
    ),
    # Cut layers.
    Mutation(
        name="gradient of a column layer's input is not summed",
        file="parallel/tensor.py",
        old="        grad_x, summing = ctx.stream.start_sum(grad @ weight)",
        new="        grad_x = grad @ weight\n"
        "        _, summing = ctx.stream.start_sum(grad_x.clone())",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="every rank adds a row layer's bias",
        file="parallel/tensor.py",
        old="        y, summing = stream.start_sum(linear(x, weight))\n"
        "        summing.wait(stream.tp.timeout_s)\n"
        "        return y if bias is None else y.add_(bias)",
        new="        y, summing = stream.start_sum(linear(x, weight, bias))\n"
        "        summing.wait(stream.tp.timeout_s)\n"
        "        return y",
        layout=Layout(tp=2),
        job=GPT2,
    ),
    Mutation(
        name="positions start at zero on every rank",
        file="model/embedding.py",
        old="embedding(self.stream.own(positions), self.positions)",
        new="embedding(positions[: x.shape[0]], self.positions)",
        layout=Layout(tp=2, sequence_parallel=True),
        job=GPT2,
    ),
    Mutation(
        name="cross entropy takes the peak of its own columns",
        file="parallel/cross_entropy.py",
        old='all_reduce(own_peak.clone(), tp, op="max")',
        new="own_peak",
        layout=Layout(tp=2),
    ),
    Mutation(
        name="smoothing is spread over the rank's own columns",
        file="parallel/cross_entropy.py",
        old="mean = (total + num_real * lift) / terms.vocab_size",
        new="mean = (total + num_real * lift) / logits.shape[-1]",
        layout=Layout(tp=2),
        job=LOSSES,
    ),
    Mutation(
        name="z-loss takes the rank's own sum of exponentials",
        file="parallel/cross_entropy.py",
        old="_z_factor(log_sum_exp, terms) / sum_exp * scale",
        new="_z_factor(log_sum_exp - torch.tensor(float(tp.size)).log(), terms) / sum_exp * scale",
        layout=Layout(tp=2),
        job=LOSSES,
    ),
    Mutation(
        name="every rank masks the padding of the last one",
        file="parallel/cross_entropy.py",
        old="return min(max(vocab_size - num_columns * tp.index, 0), num_columns)",
        new="return num_columns - (-vocab_size) % num_columns",
        layout=Layout(tp=4),
        job=LOSSES,
    ),
    Mutation(
        name="padded columns of the vocabulary take probability",
        file="parallel/cross_entropy.py",
        old="    return min(max(vocab_size - num_columns * tp.index, 0), num_columns)",
        new="    return num_columns",
        layout=Layout(tp=2),
        job=("model.vocab_size=300",),
    ),
    Mutation(
        name="dropout is keyed by the slot in the micro-batch",
        file="parallel/dropout.py",
        old="    sample, position = torch.broadcast_tensors(samples, positions)",
        new="    samples = torch.arange(samples.numel())\n"
        "    sample, position = torch.broadcast_tensors(samples, positions)",
        layout=Layout(dp=2),
        job=DROPOUT,
    ),
    Mutation(
        name="attention dropout numbers heads from zero on every rank",
        file="model/core_attention.py",
        old="        first = factory.tp.index * num_heads",
        new="        first = 0",
        layout=Layout(tp=2),
        job=("model.attention_dropout=0.1",),
    ),
    # Context parallelism.
    Mutation(
        name="ranks hold chunks one after another where attention takes them for zigzag",
        file="plan/context.py",
        old="for chunk in (cp_rank, 2 * cp - 1 - cp_rank))",
        new="for chunk in (2 * cp_rank, 2 * cp_rank + 1))",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="outputs over different keys are added without a new scale",
        file="parallel/attention_blocks.py",
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
        new="        tokens=mine[2] * parts.plan.grid.dp or total[2],",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="RoPE counts from zero on every context-parallel rank",
        file="model/rope.py",
        old="return self.cos[positions, 0], self.sin[positions, 0]",
        new="positions = positions - positions[:1]\n"
        "        return self.cos[positions, 0], self.sin[positions, 0]",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="gradients are summed over dp only",
        file="train/build.py",
        old="Sharing(whole=groups.replicas, inside=",
        new="Sharing(whole=groups.dp, inside=",
        layout=Layout(cp=2),
    ),
    Mutation(
        name="gradients by keys stay where they are on the ring",
        file="parallel/context_attention.py",
        old="coming = start_pass(grad_kv, ring, work.log, by=-1)",
        new="coming = start_pass(grad_kv, ring, work.log, by=1)",
        layout=Layout(cp=4),
    ),
    Mutation(
        name="gathered keys of late chunks are taken in the ranks' order",
        file="parallel/context_attention.py",
        old="(2 * num_ranks - 1 - rank, segment.late)",
        new="(num_ranks + rank, segment.late)",
        layout=Layout(cp=4, cp_method="all_gather"),
    ),
    Mutation(
        name="exchanged heads come back in the order of the sequence",
        file="parallel/head_exchange.py",
        old="_Reorder.apply(y, back, there)",
        new="_Reorder.apply(y, there, back)",
        layout=Layout(cp=4, cp_method="all_to_all"),
    ),
    Mutation(
        name="dropout counts positions from zero on every context-parallel rank",
        file="model/stage.py",
        old="            at = held_positions(rows.documents, self.context).to(samples.device)",
        new="            at = held_positions(rows.documents, self.context)\n"
        "            at = at - at[:, :1]",
        layout=Layout(cp=2),
        job=DROPOUT,
    ),
    # Experts.
    Mutation(
        name="gradients of experts are summed over all replicas of attention",
        file="train/build.py",
        old="            whole=groups.edp, inside=groups.expert_sharers,",
        new="            whole=groups.replicas, inside=groups.expert_sharers,",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of experts are divided by their replicas",
        file="parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if bucket.is_expert:\n"
        "                self.owned(bucket).div_(bucket.sharing.whole.size)\n"
        "            if bucket.is_tied:\n",
        layout=Layout(tp=2, dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of routers are whole where the stream is not cut",
        file="parallel/sharding.py",
        old="                or tensor.serves_tokens\n",
        new="",
        layout=Layout(tp=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of routers are not summed under sequence parallelism",
        file="parallel/sharding.py",
        old="            is_partial_over_tp=sharers > 1\n",
        new="            is_partial_over_tp=sharers > 1 and not tensor.serves_tokens\n",
        layout=Layout(tp=2, sequence_parallel=True, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="the load that balances is that of one context-parallel rank",
        file="model/router.py",
        old="        return all_reduce(torch.cat((counts, num_counted[None])), self.micro)",
        new="        return torch.cat((counts, num_counted[None]))",
        layout=Layout(cp=2, ep=2, micro_batch_size=2),
        job=BALANCED,
    ),
    Mutation(
        name="the bias of experts moves by one rank's load",
        file="train/step.py",
        old="    everything = all_reduce(torch.cat((scalars, routing.flatten())), parts.groups.world)",
        new="    everything = torch.cat((all_reduce(scalars, parts.groups.world), routing.flatten()))",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=BIASED,
    ),
    Mutation(
        name="experts are cut in another order than they are dispatched",
        file="plan/tensors.py",
        old="            offset[0] = shape[0] * experts.ep_rank",
        new="            offset[0] = shape[0] * (experts.ep - 1 - experts.ep_rank)",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="padding is counted in the load of experts",
        file="model/balance.py",
        old="    counted = marks.is_counted.to(torch.float64)\n    counts",
        new="    counted = torch.ones_like(marks.is_counted, dtype=torch.float64)\n    counts",
        layout=Layout(micro_batch_size=4),
        job=LAST_LOAD,
    ),
    Mutation(
        name="probabilities are applied on both ends where tokens are gathered",
        file="parallel/dispatch.py",
        old="        self.weights = gather_positions(weights, groups.ep)\n",
        new="        self.weights = gather_positions(weights, groups.ep).square()\n",
        layout=Layout(dp=2, ep=2, dispatch="all_gather", micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="what experts drop goes by the order of ranks",
        file="model/capacity.py",
        old="    order = keys.argsort(stable=True)\n",
        new="    order = torch.arange(keys.shape[0], device=keys.device)\n",
        layout=Layout(cp=2, ep=2, micro_batch_size=2),
        job=DROPPED,
    ),
    # Packed documents.
    Mutation(
        name="packed tokens see the documents before theirs",
        file="plan/context.py",
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
        old="            mask[at : at + len(words) - 1] = True",
        new="            mask[at : at + held.length] = True",
        layout=Layout(dp=2),
        job=PACKED,
    ),
    Mutation(
        name="padding of documents predicts",
        file="data/packing.py",
        old="            mask[at : at + len(words) - 1] = True",
        new="            mask[at : at + held.padded] = True",
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
        old="places=take(starts + positions),",
        new="places=take(positions),",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED + DROPOUT,
    ),
    Mutation(
        name="what was made ahead is the first step again",
        file="data/ahead.py",
        old="self._thread.submit(self._make, *key)",
        new="self._thread.submit(self._make, 0, key[1])",
        layout=Layout(cp=2, dp=2, dynamic_cp=True),
        job=PACKED,
    ),
    # Batches and pipelines.
    Mutation(
        name="a weight gradient that was put off is forgotten",
        file="parallel/deferral.py",
        old="    for weight in list(terms):",
        new="    for weight in list(terms)[1:]:",
        layout=Layout(pp=2, schedule="zb_h1"),
    ),
    Mutation(
        name="products of a micro-batch overwrite those of the one before",
        file="parallel/deferral.py",
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
        old="mask=take([row.mask for row in rows]).float(),",
        new="mask=take([row.mask for row in rows]).float().fill_(1.0),",
        layout=Layout(dp=4),
    ),
    Mutation(
        name="only the last micro-batch's loss counts",
        file="pipeline/executor.py",
        old="            self.loss_sum += output.detach()",
        new="            self.loss_sum = output.detach()",
        layout=Layout(pp=2),
    ),
    # Optimizers that are not element-wise, or not continuous.
    Mutation(
        name="Newton and Schulz iterate on a rank's shard of a matrix",
        file="parallel/whole_matrices.py",
        old="new_empty(m.shape))\n            for box, part in zip(m.boxes, parts, strict=True):\n"
        "                if part.numel():\n",
        new="new_zeros(m.shape))\n            for box, part in zip(m.boxes, parts, strict=True):\n"
        "                if part.numel() and box == m.boxes[me]:\n",
        layout=Layout(tp=2),
        job=MUON,
    ),
    Mutation(
        name="Muon takes what is fused for one matrix",
        file="parallel/whole_matrices.py",
        old="            for piece in param.spec.pieces:\n",
        new="            for piece in param.spec.pieces[:1]:\n"
        "                one = replace(piece.tensor, shape=tuple(param.shape))\n"
        "                piece = replace(piece, tensor=one)\n",
        layout=Layout(dp=2, sharding="optimizer"),
        job=MUON,
    ),
    Mutation(
        name="Lion's moment is updated before its sign is taken",
        file="optim/updates.py",
        old="    directions = torch._foreach_lerp(moments, gradients, 1 - section.beta1)\n",
        new="    moved = torch._foreach_lerp(moments, gradients, 1 - section.beta2)\n"
        "    directions = torch._foreach_lerp(moved, gradients, 1 - section.beta1)\n",
        layout=Layout(tp=2),
        job=LION,
    ),
    # Activations on the host.
    Mutation(
        name="what comes back from the host is read from where its memory begins",
        file="model/away.py",
        old="saved.offset, saved.shape",
        new="0, saved.shape",
        layout=Layout(pp=2, offload=("activations",)),
        job=GPT2,
    ),
    # fp8: scales that know a layout.
    Mutation(
        name="a token's scale is that of its features on this rank",
        file="parallel/fp8_linear.py",
        old="_largest_over(x, cut if self.by_row else self.micro, by_row=self.by_row)",
        new="_largest_over(x, None if self.by_row else self.micro, by_row=self.by_row)",
        layout=Layout(tp=2),
        job=("precision.fp8=rowwise", "precision.fp8_end_blocks=0"),
    ),
    Mutation(
        name="a tensor's scale is that of this rank's tokens",
        file="parallel/fp8_linear.py",
        old="_largest_over(x, cut if self.by_row else self.micro, by_row=self.by_row)",
        new="_largest_over(x, cut, by_row=self.by_row)",
        layout=Layout(cp=2, micro_batch_size=2),
        job=("precision.fp8=tensorwise", "precision.fp8_end_blocks=0"),
    ),
    Mutation(
        name="a weight's columns are scaled by what this rank has of them",
        file="parallel/fp8_linear.py",
        old="lambda: self._of_weight(turned.contiguous(), place.outer)",
        new="lambda: self._of_weight(turned.contiguous(), None)",
        layout=Layout(tp=2),
        job=("precision.fp8=rowwise", "precision.fp8_end_blocks=0"),
    ),
    Mutation(
        name="blocks that stay wide are counted from each stage's own begin",
        file="model/stage.py",
        old="fp8=self.fp8 if i in in_fp8 else None",
        new="fp8=self.fp8 if i - stage.layers[0] in in_fp8 else None",
        layout=Layout(pp=2),
        job=("model.num_layers=4", "precision.fp8=rowwise"),
    ),
    Mutation(
        name="muP's factor of the logits is forgotten under a tied table",
        file="model/head.py",
        old="1 / model.width_ratio  # muP",
        new="1.0 if model.is_embedding_tied else 1 / model.width_ratio",
        layout=Layout(tp=2),
        job=("model.mup_base_width=16",),
    ),
    Mutation(
        name="blocks of 8-bit state are those of a rank's own rows",
        file="parallel/shared_blocks.py",
        old="    return size < whole and size % BLOCK > 0\n",
        new="    return size < 0 < whole\n",
        layout=Layout(tp=2),
        job=EIGHT_BITS,
    ),
    Mutation(
        name="a block's scale is that of what this rank owns of it",
        file="parallel/shared_blocks.py",
        old="            if alike and alike[0].level > Level.NONE:\n",
        new="            if alike and alike[0].level > Level.PARAMETERS:\n",
        layout=Layout(dp=3, sharding="optimizer"),
        job=EIGHT_BITS,
    ),
    # Latents, and tokens further ahead.
    Mutation(
        name="gradients of the keys that all heads share are not summed",
        file="model/latent_attention.py",
        old="        k_turned = self.stream.enter(k_turned)\n",
        new="",
        layout=Layout(tp=2),
        job=LATENT,
    ),
    Mutation(
        name="the token table that looks further ahead sums no gradients with the first stage",
        file="model/stage.py",
        old="is_copied = model.needs_token_table_last and",
        new="is_copied = model.is_embedding_tied and",
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
