"""The job file as frozen pydantic models: one class a top-level key, a description a field.

It owns what a user may write and the rules that one value alone can break. Rules between values
are in plan.validation; nothing derived is stored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from raymega.config.checkpoint import CheckpointSection as CheckpointSection
from raymega.config.checkpoint import FunctionField as FunctionField
from raymega.config.data import BatchStage as BatchStage
from raymega.config.data import DataSection as DataSection
from raymega.config.elastic import ElasticSection as ElasticSection
from raymega.config.fields import NonNegative, Positive, PositiveFloat, Section
from raymega.config.mla import MlaSection as MlaSection
from raymega.config.model import ModelSection as ModelSection
from raymega.config.moe import MoeSection as MoeSection
from raymega.config.optimizer import OptimizerSection as OptimizerSection
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


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Format of weights in compute and of activations. Masters, gradient sums, "
        "softmax, norms and the loss are float32 or better. `fp8` is short for bfloat16 with "
        "fp8=rowwise.",
    )
    fp8: Literal["none", "rowwise", "tensorwise"] = Field(
        default="none",
        description="Products of blocks' linear layers in 8 bits; embedding, head, router and experts "
        "stay in dtype. rowwise: a scale for each token and each row of a weight; weight gradients stay in "
        "dtype. tensorwise: a scale for each tensor of a micro-batch, weight gradients too, and a run with "
        "another micro_batch_size is another run. A CPU computes the same numbers in float32, slower.",
    )
    fp8_end_blocks: NonNegative = Field(
        default=1,
        description="So many first and so many last blocks keep all products in dtype.",
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
    """What is computed again in backward rather than kept, and what is kept on the host."""

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
    offload: tuple[Literal["activations", "optimizer"], ...] = Field(
        default=(),
        description="What waits in host memory while nothing uses it, copied behind the work. activations: "
        "what blocks keep for backward. optimizer: masters and state, but for while they are updated. The same "
        "bits; on a CPU a plain copy that gains nothing.",
    )


class TrackingSection(Section):
    """Where metrics go."""

    mlflow_uri: str = Field(
        default="run",
        description="MLflow tracking URI; `run` is a sqlite file in the run's folder (or, for a "
        "run in an object store, in `~/.raymega/remote/<uri>/<run.name>`), `off` is none.",
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


class ClusterSection(Section):
    """What a worker needs and how long to wait for it."""

    host: Literal["ray", "ray_train"] = Field(
        default="ray",
        description="What starts the workers. ray: actors in placement groups, which survive the loss of "
        "others. ray_train: a ray.train.TorchTrainer, in whose tab of the dashboard the run then is; a loss "
        "costs all processes, and the grid stays.",
    )
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

    @property
    def run_uri(self) -> str:
        """Folder of the job's run in its store."""
        return f"{self.checkpoint.uri.rstrip('/')}/{self.run.name}"

    def with_values(self, **sections: Mapping[str, Any]) -> Job:
        """The job with other values in some sections; each must be legal by itself, and none is checked."""
        changed = {name: getattr(self, name).model_copy(update=v) for name, v in sections.items()}
        return self.model_copy(update=changed)
