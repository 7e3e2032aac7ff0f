"""The job file as frozen pydantic models: one class per top-level key, one description per field.

It defines what a user may write, and the rules that a single value can break. Rules between values are
in ``raymega/plan/validation``; nothing derived is stored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raymega.config.checkpoint import CheckpointSection as CheckpointSection
from raymega.config.checkpoint import FunctionField as FunctionField
from raymega.config.data import BatchStage as BatchStage
from raymega.config.data import DataSection as DataSection
from raymega.config.distillation.section import DistillationSection as DistillationSection
from raymega.config.elastic import ElasticSection as ElasticSection
from raymega.config.fields import (
    NonNegative,
    NonNegativeFloat,
    PluginName,
    Positive,
    PositiveFloat,
    Section,
)
from raymega.config.lora import LoraSection as LoraSection
from raymega.config.mla import MlaSection as MlaSection
from raymega.config.model import ModelSection as ModelSection
from raymega.config.moe import MoeSection as MoeSection
from raymega.config.optimizer import OptimizerSection as OptimizerSection
from raymega.config.parallel import ParallelSection as ParallelSection
from raymega.config.parallel import ScheduleSection as ScheduleSection
from raymega.config.preference import PreferenceSection as PreferenceSection
from raymega.plugins import Kind, find, module_faults


class EvalTask(Section):
    """Evaluation task of a run."""

    task: Literal["wikitext", "lambada", "race", "perplexity", "images"] = Field(
        description="Protocol, as of `raymega eval --task`."
    )
    path: str = Field(description="Test set of the task, a file on the driver's machine.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,49}$")] = Field(
        default="task",
        description="Name in metrics, eval/task/NAME/METRIC; `task` is the task's own.",
    )
    limit: NonNegative = Field(
        default=0, description="Number of documents, or of windows, from the front; 0 is all."
    )
    stride: NonNegative = Field(
        default=0, description="Tokens by which a window moves on; 0 is the task's own."
    )

    @property
    def title(self) -> str:
        """Name of the task in metrics."""
        return self.task if self.name == "task" else self.name


class RunSection(Section):
    """Name, length and evaluation of the run."""

    # Identity and length.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run. The same name continues the same run; also a folder name."""
    steps: NonNegative = 0
    """Optimizer steps in the whole run; may be raised later. 0: run.tokens or run.epochs says it."""
    tokens: NonNegative = 0
    """Tokens to train on in place of steps: the run has the fewest steps that read as many. A sequence
    counts seq_len, padding included."""
    epochs: NonNegativeFloat = 0.0
    """Passes over data.path to train for in place of steps: the run has the fewest steps that read as
    many sequences."""
    seed: NonNegative = 1234
    """Seed of initialisation and data order. It cannot change during the run."""
    # Evaluation.
    eval_every: NonNegative = 0
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    eval_samples: NonNegative = 64
    """Number of sequences of the validation split that one evaluation reads, at most all of them; 0
    turns evaluation off."""
    eval_ema: bool = False
    """Evaluate the moving average of the weights (optimizer.ema_decay) too, beside the weights, as
    eval/ema_loss. An evaluation takes twice as long; training itself is not changed."""
    # Samples of text.
    samples_every: NonNegative = 0
    """Steps between samples of text, which the model continues from sample_prompts; 0 is never. Each
    token takes a forward pass on the training grid; training itself is not changed."""
    sample_prompts: tuple[str, ...] = ()
    """Texts that a sample continues."""
    sample_images: tuple[str, ...] = ()
    """Files of images that the marks <image> in sample_prompts stand for, in order; every worker reads them."""
    sample_tokens: Positive = 32
    """Number of tokens that a sample adds to each prompt, at most; prompt and sample fit data.seq_len."""
    sample_temperature: NonNegativeFloat = 0.0
    """Divisor of the logits from which a sample's tokens are drawn; 0 takes the likeliest token. Random
    numbers are keyed by run.seed, and the same on every grid."""
    eval_tasks: tuple[EvalTask, ...] = Field(
        default=(),
        description="Evaluation tasks during the run, each entry `{task, path, name, limit, stride}`.",
    )
    eval_tasks_every: NonNegative = 0
    """Steps between evaluations on run.eval_tasks; 0 evaluates at the end only."""
    eval_tasks_on: Literal["grid", "beside"] = "grid"
    """Workers that evaluate run.eval_tasks. grid: those that train, between two steps. beside: workers of
    their own, which load the newest checkpoint while the others train."""
    eval_tasks_grid: str = "tp=1"
    """beside only: degrees of the grid of these workers, such as `tp=2,pp=2`."""
    # Kernels.
    deterministic: bool = False
    """Use kernels whose result does not vary between equal runs, and refuse those that have no such form.
    Matters on GPUs, where sums by atomic adds vary without it."""
    kernels: Literal["auto", "eager", "compile"] = "auto"
    """Kernels of the operations between a layer's matrix products. compile: with fused kernels
    that torch.compile makes in the first step, which takes a minute and a C compiler, on CPUs a C++
    compiler; without one a log line says so and nothing is fused. auto: compile on GPUs, unless
    run.deterministic; eager on CPUs."""


class PrecisionSection(Section):
    """Number formats, and the loss scale of float16."""

    # Formats.
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Format of weights in compute and of activations. Masters, gradient sums, softmax, norms and
    the loss are float32 or better. `fp8` is short for bfloat16 with fp8=rowwise."""
    fp8: Literal["none", "rowwise", "tensorwise"] = "none"
    """8-bit matrix products of the blocks' linear layers; embedding, head and router stay in dtype,
    and routed experts multiply by rows with either value. rowwise: a scale for each token and each
    row of a weight; weight gradients stay in dtype. tensorwise: a scale for each tensor of a
    micro-batch, and weight gradients in 8 bits too; micro_batch_size then changes the results. A
    CPU computes the same numbers in float32, slower."""
    fp8_end_blocks: NonNegative = 1
    """Number of blocks at the front, and at the end, that keep all products in dtype."""
    # Dynamic loss scale.
    loss_scale: PositiveFloat = 65536.0
    """float16 only: initial factor on the mean loss of a micro-batch. It doubles after
    loss_scale_window good steps and halves with an overflow."""
    loss_scale_window: Positive = 1000
    """float16 only: number of consecutive good steps before the factor doubles."""
    loss_scale_hysteresis: Positive = 2
    """float16 only: number of the overflow since the last doubling from which on each overflow
    halves the factor. Earlier ones only skip their step."""
    min_loss_scale: PositiveFloat = 1.0
    """float16 only: an overflow at this factor ends the run (exit 5)."""


class MemorySection(Section):
    """Recomputation of activations in backward, and offloading to host memory."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward. selective: those of recompute_parts. full: those of whole
    blocks, of which only the input is kept."""
    recompute_parts: tuple[Literal["attention", "activation", "norm"], ...] = ("attention",)
    """selective only. attention: softmax(q k^T) v. activation: the feed-forward layer's
    nonlinearity. norm: norms' outputs."""
    recompute_every: Positive = 1
    """full only: number of consecutive blocks that keep one input and are recomputed together."""
    # Offload to the host.
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """Tensors kept in host memory while nothing uses them, copied during the computation.
    activations: those that blocks keep for backward. optimizer: masters and state, except during
    their update. Results have the same bits. On a CPU it is a plain copy without gain."""


class TrackingSection(Section):
    """Destinations and intervals of metrics."""

    # Destinations.
    trackers: tuple[str, ...] = ("console", "mlflow")
    """Trackers that record the run, each in a thread of its own: console (lines of `raymega train`),
    jsonl (curves.jsonl), mlflow, tensorboard, wandb, webhook. metrics.jsonl is always written."""
    mlflow_uri: str = "run"
    """MLflow tracking URI; `run` is a sqlite file in the run's folder (or, for a run in an object
    store, in `~/.raymega/remote/<uri>/<run.name>`), `off` is none."""
    experiment: str = "raymega"
    """Name of the MLflow experiment, and of the Weights & Biases project."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """wandb only. offline: files in the run's folder, which `wandb sync` uploads. online: a login of
    this machine is needed."""
    webhook_url: str = "off"
    """webhook only: address that gets each incident as JSON by POST. `$NAME` takes the environment
    variable of the driver, for an address that is a secret."""
    # Intervals.
    tracker_every: NonNegative = 0
    """Steps between the steps that trackers get. 0 is every step to the 1,000th, every 10th to the
    10,000th, every 100th to the 100,000th, and so on; metrics.jsonl has the others."""
    console_every: Positive = 10
    """Steps between console lines."""
    timeline_every: NonNegative = 0
    """Steps between recorded pipeline timelines; 0 is never."""
    norms_every: NonNegative = 0
    """Steps between measurements of the norms of weights and gradients by group of tensors; 0 is
    never."""
    activations_every: NonNegative = 0
    """Steps between statistics of each block's output and its gradient; 0 is never."""


class PluginsSection(Section):
    """Code of your own; `plugins: [acme.plugins]` is short for its modules."""

    modules: tuple[str, ...] = ()
    """Modules with a list PLUGINS, or entry points of a wheel; `acme.plugins==1.2` wants that version
    on every node. Checkpoints have the versions."""
    callbacks: tuple[PluginName, ...] = ()
    """Names of callbacks that every worker calls: as a step begins and ends, after an evaluation, and as a
    checkpoint is begun."""
    metrics: tuple[PluginName, ...] = ()
    """Names of metrics that every worker computes after each step; reported as plugin/metric/NAME."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of plug-ins by their name, such as `{acme.focal: {gamma: 2.0}}`; `raymega schema --plugins`
    lists those of a module."""

    @model_validator(mode="after")
    def _load(self) -> Self:
        """Make the parts of the modules known to this process; faults are told by a rule of the job file."""
        module_faults(self.modules)
        return self

    def __hash__(self) -> int:
        """Return a hash, though options are a mapping: plans are kept by job."""
        return hash((self.modules, self.callbacks, self.metrics, *sorted(self.options)))

    def code(self, kind: Kind, name: str) -> Any:
        """Return the code of a part that the job names, with its options.

        Raises:
            ConfigError: There is no such part, its code fails at import, or an option is refused.
        """
        return find(kind, name).with_options(self.options.get(name, {}))


class ClusterSection(Section):
    """Workers and the resources that they need."""

    # Launch and devices.
    host: Literal["ray", "ray_train"] = "ray"
    """Launcher of the workers. ray: actors in placement groups, which survive the loss of other
    workers. ray_train: a ray.train.TorchTrainer, whose tab of the dashboard shows the run; the loss
    of a worker ends all processes, and the grid stays as it is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda when a node has GPUs or Ray knows of a node type with GPUs, else cpu. Set cuda
    where GPU nodes start on demand: not every autoscaler reports its node types to Ray."""
    num_workers: Positive | Literal["grid"] = "grid"
    """Number of workers that the job expects, which the product of the grid's degrees must equal;
    `grid` is that product."""
    # Planning and resources.
    accelerator: str = "device"
    """Accelerator for which parallel.layout=auto plans: a name that `raymega plan --gpu` takes, or
    the YAML file that `raymega doctor --calibrate` writes. `device` is cpu for cluster.device=cpu;
    a GPU must be named."""
    cpus_per_worker: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 1.0
    """CPUs that Ray reserves for a worker. 0.1 suits laptop runs."""
    capacity_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Longest wait for free slots before exit 3."""


class Job(Section):
    """A whole job file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    preference: PreferenceSection = PreferenceSection()
    distillation: DistillationSection = DistillationSection()
    parallel: ParallelSection = ParallelSection()
    schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerSection
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    tracking: TrackingSection = TrackingSection()
    cluster: ClusterSection = ClusterSection()
    plugins: PluginsSection = PluginsSection()

    @property
    def run_uri(self) -> str:
        """Folder of the job's run in its store."""
        return f"{self.checkpoint.uri.rstrip('/')}/{self.run.name}"

    @property
    def dataset_paths(self) -> tuple[str, ...]:
        """Paths of all datasets that the run reads, those of its validation sets too."""
        sets = self.data.validation if self.run.eval_samples else ()
        return tuple(dict.fromkeys([*self.data.datasets, *(entry.path for entry in sets)]))

    def with_values(self, **sections: Mapping[str, Any]) -> Job:
        """Return the job with other values in some sections; the values are not validated."""
        changed = {name: getattr(self, name).model_copy(update=v) for name, v in sections.items()}
        return self.model_copy(update=changed)
