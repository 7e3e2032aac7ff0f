"""The job file as frozen pydantic models: one class a top-level key, a description a field.

It owns what a user may write and the rules that one value alone can break. Rules between values
are in plan.rules; nothing derived is stored here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.checkpoint import CheckpointSection as CheckpointSection
from raymega.config.checkpoint import FunctionField as FunctionField
from raymega.config.data import BatchStage as BatchStage
from raymega.config.data import DataSection as DataSection
from raymega.config.fields import Decay, Fraction, NonNegative, Positive, PositiveFloat, Section
from raymega.config.mla import MlaSection as MlaSection
from raymega.config.moe import MoeSection as MoeSection
from raymega.config.parallel import ParallelSection as ParallelSection
from raymega.config.parallel import ScheduleSection as ScheduleSection


class RunSection(Section):
    """Which run this is and how long it lasts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        description="Name of the run. The same name continues the same run; also a folder name."
    )
    steps: Positive = Field(description="Optimizer steps in the whole run; may be raised later.")
    seed: NonNegative = Field(
        default=1234,
        description="Seed of initialisation and data order. Fixed for the run's life.",
    )
    eval_every: NonNegative = Field(
        default=0,
        description="Steps between evaluations on the validation split; 0 is only at the end.",
    )
    eval_samples: NonNegative = Field(
        default=64,
        description="Sequences of the validation split that one evaluation reads, at most all of "
        "them; 0 is none.",
    )
    deterministic: bool = Field(
        default=False,
        description="Refuse kernels whose result varies between equal runs. Matters on GPUs.",
    )
    kernels: Literal["eager", "compile"] = Field(
        default="eager",
        description="How a layer computes what lies between its matrix products. compile: in fused "
        "kernels that torch.compile makes in the first step, which takes a minute and, on CPUs, a C++ "
        "compiler; without one a log line says so and nothing is fused.",
    )


class ModelSection(Section):
    """The network: a family's layers and its widths."""

    family: Literal["gpt2", "llama", "qwen2", "qwen3"] = Field(
        description="gpt2: learned positions, LayerNorm, GELU, biases. llama: RoPE, RMSNorm, SwiGLU, "
        "no biases. qwen2: llama with q, k, v biases. qwen3: llama with RMSNorm of q and k heads."
    )
    num_layers: Positive = Field(description="Transformer blocks.")
    width: Positive = Field(description="D, features of the residual stream.")
    num_heads: Positive = Field(description="H, query heads.")
    num_kv_heads: Positive | Literal["num_heads"] = Field(
        default="num_heads",
        description="G, key and value heads; fewer than num_heads is grouped-query attention.",
    )
    head_features: Positive | Literal["width / num_heads"] = Field(
        default="width / num_heads", description="K, features of one head."
    )
    ffn_width: Positive = Field(description="F, features inside the feed-forward layer.")
    vocab_size: Positive = Field(description="V, tokens of the model; at least the tokenizer's.")
    max_positions: Positive = Field(
        default=2048,
        description="Longest sequence; rows of gpt2's position table. Not below data.seq_len.",
    )
    is_embedding_tied: bool = Field(
        default=True, description="The head uses the token embedding's weight."
    )
    init_std: PositiveFloat = Field(
        default=0.02,
        description="Standard deviation of initial weights; divided by sqrt(2 * num_layers) for "
        "the two projections that write to the residual stream.",
    )
    norm_eps: PositiveFloat = Field(default=1e-5, description="Added to the variance in norms.")
    rope_base: PositiveFloat = Field(default=10000.0, description="Base of RoPE's wave lengths.")
    rope_scaling: Literal["none", "llama3", "yarn"] = Field(
        default="none",
        description="llama3: waves longer than rope_original_positions / rope_low_freq_factor are "
        "stretched by rope_factor, up to ... / rope_high_freq_factor kept, between them in part. "
        "yarn: the same between two whole features, and scores grow with log(rope_factor).",
    )
    rope_factor: PositiveFloat = Field(default=8.0, description="llama3 and yarn scaling only.")
    rope_low_freq_factor: PositiveFloat = Field(
        default=1.0, description="llama3 and yarn scaling only; yarn calls it beta_slow."
    )
    rope_high_freq_factor: PositiveFloat = Field(
        default=4.0, description="llama3 and yarn scaling only; yarn calls it beta_fast, often 32."
    )
    rope_original_positions: Positive = Field(
        default=8192, description="Longest sequence before llama3 or yarn scaling."
    )
    rope_mscale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="yarn only, m: turned features are multiplied by 1 + m log(rope_factor) / 10, "
        "over the same with rope_mscale_all_features.",
    )
    rope_mscale_all_features: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="yarn with model.mla only, m: scores of whole heads are multiplied by the square "
        "of 1 + m log(rope_factor) / 10.",
    )
    vocab_multiple: Positive = Field(
        default=128,
        description="The table's rows are padded to a multiple of this, whatever the layout is. "
        "Padded rows stay zero and get no probability; parallel.tp must divide the padded number.",
    )
    residual_dropout: Decay = Field(
        default=0.0,
        description="Share of features dropped after the embedding and before each residual sum.",
    )
    attention_dropout: Decay = Field(
        default=0.0,
        description="Share of attention weights dropped. Above 0 attention keeps its S x S weights "
        "in memory, without the fused kernel.",
    )
    label_smoothing: Decay = Field(
        default=0.0,
        description="Share of a label's probability that is spread evenly over the vocabulary; "
        "training loss only.",
    )
    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Weight of log(sum of exp(logits))^2 in each token's loss; training loss only.",
    )
    moe: MoeSection = Field(
        default=MoeSection(), description="Mixture of experts; without it every block is dense."
    )

    mla: MlaSection = Field(
        default=MlaSection(),
        description="Multi-head latent attention; without it heads are made of the stream.",
    )
    mtp_depth: NonNegative = Field(
        default=0,
        description="Multi-token prediction (DeepSeek-V3): blocks after the last one, each of which "
        "predicts one token further ahead, with the model's own embedding and head. Training only.",
    )
    mtp_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.3, description="Weight in the training loss of the mean of their losses."
    )

    @property
    def kv_heads(self) -> int:
        """G as a number."""
        return self.num_heads if self.num_kv_heads == "num_heads" else self.num_kv_heads

    @property
    def expert_width(self) -> int:
        """F of one expert as a number."""
        return self.ffn_width if self.moe.width == "ffn_width" else self.moe.width

    @property
    def table_rows(self) -> int:
        """V padded: rows of the token table and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_width(self) -> int:
        """K, features of one head."""
        if self.mla.kv_rank:
            return self.mla.nope_features + self.mla.rope_features
        if self.head_features == "width / num_heads":
            return self.width // self.num_heads
        return self.head_features

    @property
    def value_width(self) -> int:
        """Features of one value head."""
        return self.mla.value_features if self.mla.kv_rank else self.head_width

    @property
    def turned_width(self) -> int:
        """Features of a query or key head that RoPE turns."""
        return self.mla.rope_features if self.mla.kv_rank else self.head_width

    @property
    def needs_token_table_last(self) -> bool:
        """The last stage reads the token embedding's weight too."""
        return self.is_embedding_tied or self.mtp_depth > 0


class OptimizerSection(Section):
    """The update and its schedule."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw",
        description="adamw: decoupled weight decay. sgd: with momentum, and the decay in the "
        "gradient.",
    )

    lr: PositiveFloat = Field(description="Peak learning rate.")
    min_lr_ratio: Fraction = Field(
        default=0.1, description="Learning rate at the end of the decay, as a share of lr."
    )
    lr_warmup_steps: NonNegative = Field(
        default=0, description="Steps of linear growth from 0 to lr."
    )
    lr_schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = Field(
        default="cosine",
        description="What follows the warm-up. wsd: stable at lr, then a linear decay over the last "
        "lr_cooldown_steps. inverse_sqrt: lr * sqrt(lr_warmup_steps / step), without an end.",
    )
    lr_decay_steps: Positive | Literal["steps"] = Field(
        default="steps",
        description="Step at which the schedule reaches its end; `steps` is run.steps.",
    )
    lr_cooldown_steps: NonNegative = Field(
        default=0, description="Steps of wsd's decay, the last ones before lr_decay_steps."
    )
    beta1: Decay = Field(default=0.9, description="Decay of the first moment.")
    beta2: Decay = Field(default=0.95, description="Decay of the second moment.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    momentum: Decay = Field(default=0.9, description="sgd only: share of the last update kept.")
    embedding_lr_scale: PositiveFloat = Field(
        default=1.0, description="Times lr for token and position tables."
    )
    head_lr_scale: PositiveFloat = Field(
        default=1.0, description="Times lr for the head's own weight; a tied one is an embedding."
    )
    norm_lr_scale: PositiveFloat = Field(
        default=1.0, description="Times lr for norms' weights and all biases."
    )
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1, description="Weight decay of matrices; norms and biases have none."
    )
    is_embedding_decayed: bool = Field(
        default=True, description="Weight decay applies to token and position tables too."
    )
    clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Largest global gradient norm; 0 turns clipping off."
    )


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Format of weights in compute and of activations. Masters, gradient sums, "
        "softmax, norms and the loss are float32 or better.",
    )
    loss_scale: PositiveFloat = Field(
        default=65536.0,
        description="float16 only: first factor on the mean loss of a micro-batch. Doubles after "
        "loss_scale_window good steps; halves with an overflow.",
    )
    loss_scale_window: Positive = Field(
        default=1000, description="float16 only: good steps in a row before the factor doubles."
    )
    loss_scale_hysteresis: Positive = Field(
        default=2,
        description="float16 only: the overflow since the last doubling from which on each one "
        "halves the factor. Those before only skip their step.",
    )
    min_loss_scale: PositiveFloat = Field(
        default=1.0,
        description="float16 only: an overflow at this factor ends the run (exit 5).",
    )


class MemorySection(Section):
    """What is computed again in backward rather than kept."""

    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="selective: the parts in recompute_parts. full: whole blocks, of which only "
        "the input is kept.",
    )
    recompute_parts: tuple[Literal["attention", "activation", "norm"], ...] = Field(
        default=("attention",),
        description="selective only. attention: softmax(q k^T) v. activation: the feed-forward "
        "layer's nonlinearity. norm: norms' outputs.",
    )
    recompute_every: Positive = Field(
        default=1,
        description="full only: so many blocks in a row are kept as one input and computed again "
        "together.",
    )


class ElasticSection(Section):
    """How the driver meets failures."""

    max_failures: NonNegative = Field(
        default=3, description="Restarts of the worker group before the run gives up (exit 4)."
    )
    collective_timeout_s: PositiveFloat = Field(
        default=300.0, description="Longest wait of a collective or a pipeline transfer."
    )
    start_timeout_s: PositiveFloat = Field(
        default=180.0, description="Longest wait for workers to start and to meet."
    )
    stop_timeout_s: PositiveFloat = Field(
        default=120.0, description="Longest wait for the last save when a run is asked to stop."
    )
    spares: NonNegative = Field(
        default=0,
        description="Workers held ready beside the grid, loaded and idle; one takes a lost worker's rank "
        "at once, and another is made behind it. A multiple of parallel.tp where tp groups stay on a "
        "node: they move as a whole.",
    )
    min_workers: Positive | Literal["grid"] = Field(
        default=1,
        description="Fewest workers that a run which has lost some goes on with, on the best smaller "
        "grid; `grid` waits for the job's own instead.",
    )
    replan_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=5.0,
        description="How long a run that has lost workers waits for others before it takes a smaller "
        "grid.",
    )
    grow: bool = Field(
        default=True,
        description="Go back to the job's own grid when there are workers for it again and that saves "
        "more time than it costs.",
    )
    grow_horizon_s: PositiveFloat = Field(
        default=3600.0,
        description="How long workers that came back are trusted to stay: time saved beyond it does "
        "not count when the cost of growing is weighed.",
    )
    snapshot_every: NonNegative = Field(
        default=0,
        description="Steps between snapshots of the state in host memory of the worker's own node "
        "and of a partner node, from which a lost worker or node is made up for; 0 is never.",
    )
    snapshot_when_late: Literal["wait", "skip"] = Field(
        default="wait",
        description="When a snapshot is due and the one before is still on its way. wait: training "
        "stands still, so that a loss costs no more than snapshot_every says. skip: it is taken "
        "after a later step.",
    )
    snapshot_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="Longest wait for a file of a snapshot to reach another node's memory, or to "
        "come back.",
    )


class TrackingSection(Section):
    """Where metrics go."""

    mlflow_uri: str = Field(
        default="run",
        description="MLflow tracking URI; `run` is a sqlite file in the run's folder (or, for a "
        "run in an object store, in ~/.raymega/remote/<uri>/<run.name>), `off` is none.",
    )
    experiment: str = Field(default="raymega", description="MLflow experiment.")
    console_every: Positive = Field(default=10, description="Steps between console lines.")
    timeline_every: NonNegative = Field(
        default=0, description="Steps between recorded pipeline time lines; 0 is never."
    )
    norms_every: NonNegative = Field(
        default=0,
        description="Steps between norms of weights and gradients by group of tensors; 0 is never.",
    )
    activations_every: NonNegative = Field(
        default=0,
        description="Steps between statistics of each block's output and its gradient; 0 is never.",
    )
    ray_train_tab: bool = Field(
        default=False,
        description="Put the run into Ray Train's list of runs too, which a Train tab shows. Uses "
        "private parts of Ray, and leaves one small process of Ray's on the cluster.",
    )


class ClusterSection(Section):
    """What a worker needs and how long to wait for it."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="auto is cuda when a node has GPUs or Ray knows of a node type that has, else "
        "cpu. Set cuda where GPU nodes start on demand: not every autoscaler tells Ray its types.",
    )
    num_workers: Positive | Literal["grid"] = Field(
        default="grid",
        description="Workers that the job expects; the grid's product must equal it. `grid` takes "
        "the product as it is.",
    )
    accelerator: str = Field(
        default="device",
        description="What parallel.layout=auto plans for: a name that `raymega plan --gpu` takes, or the "
        "YAML file that `raymega doctor --calibrate` writes. `device` is cpu for cluster.device=cpu; for "
        "GPUs it must be named.",
    )
    cpus_per_worker: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = Field(
        default=1.0, description="CPUs that Ray reserves for a worker. 0.1 suits laptop runs."
    )
    capacity_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=60.0, description="Longest wait for free slots before exit 3."
    )


class Job(Section):
    """A whole job file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    parallel: ParallelSection = ParallelSection()
    schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerSection
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    tracking: TrackingSection = TrackingSection()
    cluster: ClusterSection = ClusterSection()
