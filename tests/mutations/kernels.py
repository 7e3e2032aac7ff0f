"""Planted mistakes: what layers do otherwise where kernels between products are compiled."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import GPT2, Mutation

COMPILED = Layout(dp=2, kernels="compile")

KERNELS: tuple[Mutation, ...] = (
    Mutation(
        name="a bias that the compiled GELU adds is added by the product too",
        file="model/layers/mlp.py",
        old="adds_bias=not self.is_fused)",
        new="adds_bias=True)",
        layout=COMPILED,
        job=GPT2,
    ),
    Mutation(
        name="a compiled GELU that is made again gives its bias no gradient",
        file="model/layers/mlp.py",
        old="partial(bias_gelu, bias=bias)",
        new="partial(bias_gelu, bias=bias.detach())",
        layout=Layout(
            tp=2, kernels="compile", recompute="selective", recompute_parts=("activation",)
        ),
        job=GPT2,
    ),
    Mutation(
        name="the compiled GELU's slope takes its cube once",
        file="model/layers/fused_ops.py",
        old="(1 + 3 * GELU_CUBE * wide.square())",
        new="(1 + GELU_CUBE * wide.square())",
        layout=COMPILED,
        job=GPT2,
    ),
    Mutation(
        name="compiled gradients of queries and keys are turned forward once more",
        file="model/attention/rope.py",
        old="torch.cat((a * cos + b * sin, b * cos - a * sin, *rest), -1)",
        new="torch.cat((a * cos - b * sin, b * cos + a * sin, *rest), -1)",
        layout=Layout(tp=2, kernels="compile"),
    ),
    Mutation(
        name="the compiled gate's slope leaves out that the sigmoid changes",
        file="model/layers/fused_ops.py",
        old="grad * up * share * (1 + gate * (1 - share))",
        new="grad * up * share",
        layout=COMPILED,
    ),
    Mutation(
        name="the compiled RMSNorm's gradient has a part along x",
        file="model/layers/fused_ops.py",
        old="(grad * weight).addcmul_(normal, along, value=-1).mul_(inverse)",
        new="(grad * weight).mul_(inverse)",
        layout=COMPILED,
    ),
    Mutation(
        name="the compiled loss spreads no smoothing over the other columns",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="softmax * factor.unsqueeze(-1) - everywhere.unsqueeze(-1)",
        new="softmax * factor.unsqueeze(-1)",
        layout=COMPILED,
        job=("model.label_smoothing=0.1",),
    ),
    Mutation(
        name="the compiled loss takes each rank's own sum of exponentials in its gradient",
        file="parallel/tensor_parallel/cross_entropy.py",
        old="(logits.detach(), number, factor, everywhere)",
        new="(logits.detach(), logits.logsumexp(-1), factor, everywhere)",
        layout=Layout(tp=2, kernels="compile"),
    ),
)
