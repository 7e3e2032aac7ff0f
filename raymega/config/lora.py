"""The job file's model.lora section: low-rank adapters on linear layers."""

from __future__ import annotations

from typing import Literal

from raymega.config.fields import Decay, NonNegative, PositiveFloat, Section


class LoraSection(Section):
    """Low-rank adaptation (LoRA, Hu et al. 2021): y = W x + scale B A x with W frozen; fields as PEFT's."""

    r: NonNegative = 0
    """Rank of the adapters; 0 trains the model itself. With adapters, weights other than theirs are frozen
    unless model.train names them, and checkpoints hold only what is trained."""
    lora_alpha: PositiveFloat = 8.0
    """An adapter's output is multiplied by lora_alpha / r."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) instead (rank-stabilised LoRA, Kalajdzievski 2023)."""
    use_dora: bool = False
    """Train the norm of each row of W + scale B A apart, as a vector of magnitudes (weight-decomposed LoRA, DoRA,
    Liu et al. 2024). They begin as the norms of W, and no gradient passes the norm, as in PEFT."""
    target_modules: tuple[str, ...] = ("attention.*", "mlp.*")
    """Patterns of linear layers inside blocks that get an adapter: `attention.q`, `mlp.*`, `moe.shared.*`,
    or a whole name such as `layers.3.mlp.up`."""
    lora_dropout: Decay = 0.0
    """Share of an adapter's input features that is dropped in training, for each adapter apart."""

    base_dtype: Literal["compute", "fp8", "nf4"] = "compute"
    """Format in which frozen matrices of blocks are held. compute: precision.dtype. nf4: 4-bit codes in blocks of
    64 with doubly quantised scales (QLoRA, Dettmers et al. 2023). fp8: codes of float8 e4m3 with the same scales.
    Codes are decoded for each use; embedding, head, norms and routers stay in precision.dtype."""

    @property
    def scale(self) -> float:
        """Factor on an adapter's output."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)
