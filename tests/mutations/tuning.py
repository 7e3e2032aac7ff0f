"""Planted mistakes in adapters, frozen weights and noise."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import EXPERTS, TWO_KV_HEADS, Mutation

LORA = ("model.lora={r: 4, use_rslora: true, lora_dropout: 0.1}",)
EXPERT_LORA = (*EXPERTS, "model.lora={r: 4, target_modules: ['moe.*']}")
DORA = ("model.lora={r: 4, use_dora: true, lora_dropout: 0.1}",)
EXPERT_DORA = (*EXPERTS, "model.lora={r: 4, use_dora: true, target_modules: ['moe.*']}")
NOISE = ("model.neftune_noise_alpha=5.0",)
SPEC, ADAPTERS = "parallel/core/shard_spec.py", "parallel/tensor_parallel/adapters.py"
MAGNITUDES = "parallel/tensor_parallel/magnitudes.py"
TABLE, EMBEDDING = "plan/adapters.py", "model/layers/embedding.py"
TUNING: tuple[Mutation, ...] = (
    Mutation(
        name="LoRA's A is summed over tp, where each rank has the whole gradient",
        file=SPEC,
        old="or (is_sequence_parallel and tensor.tp_dim < 0)",
        new="or tensor.tp_dim < 0",
        layout=Layout(tp=2),
        job=LORA,
    ),
    Mutation(
        name="LoRA's A is not summed over the positions of other ranks",
        file=SPEC,
        old="or (is_sequence_parallel and tensor.tp_dim < 0)",
        new="or False",
        layout=Layout(tp=2, sequence_parallel=True),
        job=LORA,
    ),
    Mutation(
        name="LoRA's B of shared key and value heads is not summed",
        file=TABLE,
        old="initializer_range=0.0, tp_dim=cut if cut == 0 else -1,",
        new="initializer_range=0.0, tp_dim=cut if cut == 0 else -1, serves_heads=False,",
        layout=Layout(tp=4),
        job=(*LORA, *TWO_KV_HEADS),
    ),
    Mutation(
        name="an adapter's scale is forgotten",
        file=ADAPTERS,
        old="inner * self.settings.scale",
        new="inner",
        layout=Layout(),
        job=LORA,
    ),
    Mutation(
        name="rsLoRA's scale is LoRA's",
        file="config/lora.py",
        old="(self.r**0.5 if self.use_rslora else self.r)",
        new="self.r",
        layout=Layout(),
        job=LORA,
    ),
    Mutation(
        name="every rank drops the first features of an adapter's input",
        file=ADAPTERS,
        old="first = self.a.spec.pieces[0].box.offset[-1]",
        new="first = 0",
        layout=Layout(tp=2),
        job=LORA,
    ),
    Mutation(
        name="an adapter's dropout is keyed by the rank",
        file=ADAPTERS,
        old="place_key(settings.seed, a.spec.name)",
        new="place_key(settings.seed + b.spec.pieces[0].box.offset[0], a.spec.name)",
        layout=Layout(tp=2),
        job=LORA,
    ),
    Mutation(
        name="all adapters drop the same features",
        file=ADAPTERS,
        old="place_key(settings.seed, a.spec.name)",
        new='place_key(settings.seed, "adapter")',
        layout=Layout(),
        job=LORA,
    ),
    Mutation(
        name="an adapter drops what it did in the first micro-batch",
        file="model/pipeline_stage.py",
        old="        self.adapters.keys = token_layout.keys\n        for block in blocks:",
        new="        self.adapters.keys = self.adapters.keys or token_layout.keys\n        for block in blocks:",
        layout=Layout(),
        job=LORA,
    ),
    Mutation(
        name="experts' adapters have no scale",
        file="model/moe/expert_adapter.py",
        old="inner * scale",
        new="inner",
        layout=Layout(),
        job=EXPERT_LORA,
    ),
    Mutation(
        name="the adapters of an expert's gate and up are swapped",
        file="model/moe/experts.py",
        old='names = ("gate", "up")[-len(parts) :]',
        new='names = ("up", "gate")[-len(parts) :]',
        layout=Layout(),
        job=EXPERT_LORA,
    ),
    Mutation(
        name="DoRA's norm of a row is that of this rank's columns",
        file=MAGNITUDES,
        old="if inner is not None and inner.size > 1:",
        new="if False:",
        layout=Layout(tp=2),
        job=DORA,
    ),
    Mutation(
        name="DoRA's norm is that of the base alone",
        file=MAGNITUDES,
        old="    squares += scale * (b * mixed).sum(-1)\n",
        new="",
        layout=Layout(),
        job=DORA,
    ),
    Mutation(
        name="the gradient passes DoRA's norm",
        file=ADAPTERS,
        old="scaled = rescaled(own + added, self.magnitude, norms)",
        new="changed = base.weight + self.settings.scale * (self.b @ self.a)\n"
        "        scaled = (own + added) * (self.magnitude / torch.linalg.vector_norm(changed, dim=-1))",
        layout=Layout(),
        job=DORA,
    ),
    Mutation(
        name="magnitudes of a row-parallel layer are not summed over the positions of other ranks",
        file=SPEC,
        old="or (is_sequence_parallel and tensor.tp_dim < 0)",
        new="or (is_sequence_parallel and tensor.tp_dim < 0 and tensor.rows_of is None)",
        layout=Layout(tp=2, sequence_parallel=True),
        job=DORA,
    ),
    Mutation(
        name="magnitudes begin as the norms of this rank's columns",
        file="parallel/core/sharded_parameter.py",
        old="shape=(*box.shape, tensor.rows_of.shape[-1])",
        new="shape=(*box.shape, tensor.rows_of.shape[-1] // 2)",
        layout=Layout(),
        job=DORA,
    ),
    Mutation(
        name="experts share the magnitudes of the first rows",
        file=MAGNITUDES,
        old="    return factors.repeat_interleave(counts, 0, output_size=rows.shape[0])",
        new="    return factors[:1]",
        layout=Layout(),
        job=EXPERT_DORA,
    ),
    Mutation(
        name="DoRA rescales the layer's output before dropout",
        file=ADAPTERS,
        old="            own = self.place.base(dropped, base.weight)",
        new="            own = self.place.base(x, base.weight)",
        layout=Layout(),
        job=DORA,
    ),
    Mutation(
        name="NEFTune's noise is that of the first positions on every rank",
        file=EMBEDDING,
        old="uniform_noise(keys.own + self.place_key",
        new="uniform_noise(keys.everywhere[: len(keys.own)] + self.place_key",
        layout=Layout(tp=2, sequence_parallel=True),
        job=NOISE,
    ),
    Mutation(
        name="NEFTune's noise grows as context parallelism cuts the sequence",
        file=EMBEDDING,
        old="keys.everywhere.shape[0] * token_layout.context.degree",
        new="keys.everywhere.shape[0]",
        layout=Layout(cp=2),
        job=NOISE,
    ),
)
