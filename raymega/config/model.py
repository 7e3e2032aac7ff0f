"""The job file's model section: the family, the widths of its layers, and its training-only terms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.attention import (
    AttentionSection,
    LayerSizesSection,
    LinearAttentionSection,
    MultipliersSection,
)
from raymega.config.encoder import EncoderDecoderSection, EncoderSection
from raymega.config.fields import (
    Decay,
    NonNegative,
    PluginName,
    Positive,
    PositiveFloat,
    Section,
)
from raymega.config.heads.section import HeadSection
from raymega.config.lora import LoraSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.config.vision.section import VisionSection

Family = Literal[
    "gpt2", "llama", "qwen2", "qwen3", "phi3", "granite", "olmo2", "olmo3", "gpt_neox", "gemma2", "gemma3",
    "glm4_moe", "minimax_m2", "gpt_oss", "llama4", "qwen3_next", "qwen3_5", "nemotron_h", "bert", "megatron_bert", "roberta",
    "t5", "t5_v1_1",
]  # fmt: skip


class ModelSection(Section):
    """The network: family, sizes, initialisation, positions, regularisation."""

    # Family and sizes.
    family: Family | PluginName
    """gpt2: learned positions, LayerNorm, GELU, biases. llama: RoPE, RMSNorm, SwiGLU, no biases.
    qwen2: llama with q, k, v biases. qwen3: llama with RMSNorm of q and k heads. The parts of the
    others are in docs/families.md. A name with a dot is a plug-in's."""
    num_layers: Positive
    """Transformer blocks."""
    hidden_size: Positive
    """D, features of the residual stream."""
    num_heads: Positive
    """H, query heads."""
    num_kv_heads: Positive | Literal["num_heads"] = "num_heads"
    """G, key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: Positive | Literal["hidden_size / num_heads"] = "hidden_size / num_heads"
    """K, features of one head."""
    ffn_hidden_size: Positive
    """F, features inside the feed-forward layer."""
    swiglu_alpha: PositiveFloat = 1.702
    """gpt_oss only: factor on the gate g inside g sigmoid(alpha g) (u + 1)."""
    swiglu_limit: PositiveFloat = 7.0
    """gpt_oss only: largest gate, and largest size of what it multiplies."""
    vocab_size: Positive
    """V, tokens of the model; at least the tokenizer's."""
    max_positions: Positive = 2048
    """Longest sequence, and the rows of gpt2's position table; at least data.seq_len."""
    tie_word_embeddings: bool = True
    """The head uses the token embedding's weight."""
    # Initialisation.
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 * num_layers) for the two
    projections that write to the residual stream."""
    mup_base_width: NonNegative = 0
    """muP: width of the narrower model from which learning rates and initializer_range are taken.
    Matrices' initializer_range and rates, and the logits, are scaled by hidden_size /
    mup_base_width; 0 scales nothing."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in norms."""
    # Rotary position embedding, and its scaling to longer sequences.
    rope_theta: PositiveFloat = 10000.0
    """Base of RoPE's wavelengths."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """linear: all wavelengths are stretched by rope_factor. llama3: wavelengths above rope_original_positions / rope_low_freq_factor are stretched by
    rope_factor, those below ... / rope_high_freq_factor are kept, with a blend between. yarn: the
    same between two feature indices, and scores grow with log(rope_factor)."""
    rope_factor: PositiveFloat = 8.0
    """Factor by which wavelengths are stretched, with scaling only."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """llama3 scaling only: bound of the wavelengths that are stretched in full."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """llama3 scaling only: bound of the wavelengths that are kept."""
    rope_beta_fast: PositiveFloat = 32.0
    """yarn scaling only: feature pairs that rotate more often than this within
    rope_original_positions keep their wavelengths."""
    rope_beta_slow: PositiveFloat = 1.0
    """yarn scaling only: wavelengths of feature pairs that rotate less often than this are
    stretched by rope_factor."""
    rope_truncate: bool = True
    """yarn only: the feature pairs between which the blend lies are whole numbers."""
    rope_original_positions: Positive = 8192
    """llama3 and yarn scaling only: longest sequence before the scaling."""
    rope_mscale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """yarn only, m: rotated features are multiplied by 1 + m log(rope_factor) / 10, divided by the
    same with rope_mscale_all_dim for m."""
    rope_mscale_all_dim: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """yarn with model.mla only, m: scores of whole heads are multiplied by the square of 1 + m
    log(rope_factor) / 10."""
    make_vocab_size_divisible_by: Positive = 128
    """The token table's rows are padded to a multiple of this, whatever the layout is. Padded rows
    stay zero and get no probability; parallel.tp must divide the padded number."""
    # Regularisation and terms of the training loss.
    hidden_dropout: Decay = 0.0
    """Share of features dropped after the embedding and before each residual sum."""
    attention_dropout: Decay = 0.0
    """Share of attention weights dropped. Above 0, attention runs without the fused kernel and
    keeps its S x S weights in memory."""
    loss: Literal["cross_entropy"] | PluginName = "cross_entropy"
    """Loss of a token in training; a name with a dot is a plug-in's. Evaluations measure cross_entropy."""
    label_smoothing: Decay = 0.0
    """Share of a label's probability that is spread evenly over the vocabulary; training loss only."""
    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of log(sum of exp(logits))^2 in each token's loss; training loss only."""
    # Variants: attention by layer, constant factors, experts, latents, multi-token prediction.
    attention: AttentionSection = AttentionSection()
    """Attention of each layer: windows, scores, rotated features."""
    layer_sizes: LayerSizesSection = LayerSizesSection()
    """Widths and numbers of heads that differ by layer."""
    linear_attention: LinearAttentionSection = LinearAttentionSection()
    """Sizes of layers of kind gated_delta_net or mamba2."""
    multipliers: MultipliersSection = MultipliersSection()
    """Constant factors of the model."""
    moe: MoeSection = MoeSection()
    """Mixture of experts; without it every block is dense."""

    encoder: EncoderSection = EncoderSection()
    """Token types of encoders, and their head that classifies pairs of segments."""
    encoder_decoder: EncoderDecoderSection = EncoderDecoderSection()
    """Division of blocks and tokens between encoder and decoder, and their relative positions."""
    head: HeadSection = HeadSection()
    """Part behind the last block: a language model's head, a classifier, or scores of documents."""
    vision: VisionSection = VisionSection()
    """Tower that reads images, and the projector of its output to tokens."""
    mla: MlaSection = MlaSection()
    """Multi-head latent attention; without it heads are projected from the residual stream."""
    num_nextn_predict_layers: NonNegative = 0
    """Number of multi-token-prediction blocks (DeepSeek-V3) after the last block; each predicts one
    token further ahead, with the model's own embedding and head. Training only."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    """Weight in the training loss of the mean loss of the multi-token-prediction blocks."""
    # Tuning: what is trained, adapters, noise.
    freeze: tuple[str, ...] = ()
    """Patterns of tensors that are not trained, such as `embedding.*` or `layers.[0-3].*`. They have no
    gradients and no optimizer state."""
    train: tuple[str, ...] = ()
    """Patterns of tensors that are trained in spite of model.freeze or model.lora."""
    lora: LoraSection = LoraSection()
    """Low-rank adapters; without them the weights themselves are trained."""
    neftune_noise_alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """NEFTune: in training, noise from (-1, 1) times neftune_noise_alpha / sqrt(data.seq_len * hidden_size)
    is added to embeddings, the same on every layout."""

    @property
    def width_ratio(self) -> float:
        """Width of the model over that of muP's base model; 1 without muP."""
        return self.hidden_size / self.mup_base_width if self.mup_base_width else 1.0

    @property
    def has_random(self) -> bool:
        """True where a training forward draws random numbers."""
        dropped = self.hidden_dropout, self.attention_dropout, self.lora.lora_dropout
        return max(*dropped, self.moe.router_jitter_noise, self.neftune_noise_alpha) > 0

    @property
    def kv_heads(self) -> int:
        """G as a number."""
        return self.num_heads if self.num_kv_heads == "num_heads" else self.num_kv_heads

    @property
    def longest_row(self) -> int:
        """Most tokens of a row: max_positions, or fewer where an indexer would leave some out."""
        chosen = self.mla.index_topk if self.mla.index_n_heads else self.max_positions
        return min(chosen, self.max_positions)

    @property
    def num_rope_positions(self) -> int:
        """Rows of RoPE's table: max_positions, and more under M-RoPE for a row that begins inside an image."""
        # its last patch has the place of a whole edge, and all that follows has further ones
        return self.max_positions + max(0, self.vision.mrope_edge - 1)

    def holds_experts(self, layer: int) -> bool:
        """Return whether block ``layer`` has experts: where its kind says so, else by the section's interval."""
        kinds = self.attention.layer_types
        if "experts" in kinds:
            return self.moe.num_experts > 0 and kinds[layer % len(kinds)] == "experts"
        return self.moe.holds_experts(layer)

    @property
    def expert_width(self) -> int:
        """F of one expert as a number."""
        return (
            self.ffn_hidden_size
            if self.moe.intermediate_size == "ffn_hidden_size"
            else self.moe.intermediate_size
        )

    @property
    def table_rows(self) -> int:
        """V padded: rows of the token table and of the head."""
        return (
            -(-self.vocab_size // self.make_vocab_size_divisible_by)
            * self.make_vocab_size_divisible_by
        )

    @property
    def head_width(self) -> int:
        """K as a number: features of one query or key head."""
        # Latent attention: features without position, then those that RoPE rotates.
        if self.mla.kv_lora_rank:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        if self.head_dim == "hidden_size / num_heads":
            return self.hidden_size // self.num_heads
        return self.head_dim

    @property
    def value_width(self) -> int:
        """Features of one value head."""
        return self.mla.v_head_dim if self.mla.kv_lora_rank else self.head_width

    @property
    def rope_width(self) -> int:
        """Features of a query or key head that RoPE rotates."""
        if self.mla.kv_lora_rank:
            return self.mla.qk_rope_head_dim
        return int(self.head_width * self.attention.partial_rotary_factor)

    @property
    def has_tied_head(self) -> bool:
        """True where the head multiplies with the token embedding's weight."""
        return self.tie_word_embeddings and not self.head.is_on

    @property
    def needs_token_table_last(self) -> bool:
        """Return whether the last stage reads the token embedding's weight too."""
        return self.has_tied_head or self.num_nextn_predict_layers > 0
