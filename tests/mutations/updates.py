"""Planted mistakes: optimizers, their state in fewer bits and on the host, muP."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import EIGHT_BITS, FOCAL, GPT2, LION, MUON, Mutation

AVERAGED = ("optimizer.ema_decay=0.8", "run.eval_ema=true", "optimizer.lr=0.05")
UPDATES: tuple[Mutation, ...] = (
    Mutation(
        name="the average of other ranks' weights is not gathered",
        file="optim/optimizer.py",
        old="        self._exchange()\n        self._weights.mark_updated()\n        try:",
        new="        self._exchange()\n        try:",
        layout=Layout(dp=2, sharding="optimizer"),
        job=AVERAGED,
    ),
    Mutation(
        name="Newton and Schulz iterate on a rank's shard of a matrix",
        file="parallel/data_parallel/muon_gather.py",
        old="new_empty(m.shape))\n            for box, part in zip(m.boxes, parts, strict=True):\n"
        "                if part.numel():\n",
        new="new_zeros(m.shape))\n            for box, part in zip(m.boxes, parts, strict=True):\n"
        "                if part.numel() and box == m.boxes[me]:\n",
        layout=Layout(tp=2),
        job=MUON,
    ),
    Mutation(
        name="Muon takes what is fused for one matrix",
        file="parallel/data_parallel/muon_gather.py",
        old="            for piece in param.spec.pieces:\n",
        new="            for piece in param.spec.pieces[:1]:\n"
        "                one = replace(piece.tensor, shape=tuple(param.shape))\n"
        "                piece = replace(piece, tensor=one)\n",
        layout=Layout(dp=2, sharding="optimizer"),
        job=MUON,
    ),
    Mutation(
        name="Muon takes a rank's part of what is fused for one matrix",
        file="parallel/data_parallel/muon_gather.py",
        old="            for piece in param.spec.pieces:\n",
        new="            for piece in param.spec.pieces[:1]:\n"
        "                one = replace(piece.tensor, shape=tuple(param.shape))\n"
        "                piece = replace(piece, tensor=one)\n",
        layout=Layout(tp=2),
        job=MUON,
    ),
    Mutation(
        name="what an update changed of state that waits on the host stays behind",
        file="optim/cpu_offload.py",
        old="        self._moving = self._memory.start_out(self.tensor, self.host)\n",
        new="        if self._moving is None:\n"
        "            self._moving = self._memory.start_out(self.tensor, self.host)\n",
        layout=Layout(dp=2, offload=("optimizer",)),
    ),
    Mutation(
        name="rates that fall with depth count blocks from each stage's own begin",
        file="plan/tensor_table.py",
        old="    for layer in stage.layers:\n        table += layer_tensors(model, layer)\n",
        new="    for layer in stage.layers:\n"
        "        held, first = layer_tensors(model, layer), stage.first_layer\n"
        "        table += [replace(tensor, layer=layer - first) for tensor in held]\n",
        layout=Layout(pp=2),
        job=("optimizer.layer_lr_decay=0.8",),
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
    Mutation(
        name="a loss of a plug-in takes a rank's largest logit for that of all ranks",
        file="parallel/tensor_parallel/vocab_logits.py",
        old='peak = all_reduce(peak.clone(), self.tp, op="max")',
        new="peak = peak.clone() if all_reduce is not None else peak",
        layout=Layout(tp=2),
        job=FOCAL,
    ),
    Mutation(
        name="a loss of a plug-in sees the logits of a rank's own labels only",
        file="parallel/tensor_parallel/vocab_logits.py",
        old="        return reduce_from_tp(picked.masked_fill(is_elsewhere, 0.0), self.tp)\n",
        new="        return picked.masked_fill(is_elsewhere, 0.0)\n",
        layout=Layout(tp=2),
        job=FOCAL,
    ),
    Mutation(
        name="muP's factor of the logits is forgotten under a tied table",
        file="model/layers/lm_head.py",
        old="1 / (model.width_ratio *",
        new="1 / ((1.0 if model.tie_word_embeddings else model.width_ratio) *",
        layout=Layout(tp=2),
        job=("model.mup_base_width=16",),
    ),
    Mutation(
        name="blocks of 8-bit state are those of a rank's own rows",
        file="parallel/data_parallel/quantized_scales.py",
        old="    return size < whole and size % BLOCK > 0\n",
        new="    return size < 0 < whole\n",
        layout=Layout(tp=2),
        job=EIGHT_BITS,
    ),
    Mutation(
        name="a block's scale is that of what this rank owns of it",
        file="parallel/data_parallel/quantized_scales.py",
        old="            if alike and alike[0].level > ZeroLevel.NONE:\n",
        new="            if alike and alike[0].level > ZeroLevel.PARAMETERS:\n",
        layout=Layout(dp=3, sharding="optimizer"),
        job=EIGHT_BITS,
    ),
    Mutation(
        name="what comes back from the host is read from where its memory begins",
        file="model/layers/activation_offload.py",
        old="saved.offset, saved.shape",
        new="0, saved.shape",
        layout=Layout(pp=2, offload=("activations",)),
        job=GPT2,
    ),
)
