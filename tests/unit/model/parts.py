"""Parts of the model without communication: factories and stages for one rank of any layout."""

import numpy as np
import torch

from raymega.data.rows import Row, later_of
from raymega.model.stage_types import stage_type
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.tensor_table import model_tensors
from tests.support.stages import even_stages

CPU = torch.device("cpu")


def make_group(size: int = 1, index: int = 0) -> Group:
    """A group that can be built with; at size 1 it can also be computed with."""
    return Group(name="tp", ranks=tuple(range(size)), index=index, timeout_s=60, handle=None)


def make_stream(tp: Group | None = None, *, is_sequence_parallel=False) -> SequenceParallel:
    return SequenceParallel(tp=tp or make_group(), is_sequence_parallel=is_sequence_parallel)


def make_factory(tensors, *, sp=None, dtype=torch.float64, fp8=None) -> ParameterFactory:
    table = {tensor.name: tensor for tensor in tensors}
    sp = sp or make_stream()
    return ParameterFactory(table=table, sp=sp, dtype=dtype, device=CPU, seed=7, fp8=fp8)


def make_model_factory(model, **options) -> ParameterFactory:
    return make_factory(model_tensors(model), **options)


def make_stage_modules(
    model, *, num_stages=1, sp=None, experts=None, context=None, dtype=torch.float64, seed=7
):
    """Every stage of ``model`` as one tensor-parallel rank holds it."""
    return [
        stage_type(model)(
            model,
            stage,
            sp=sp or make_stream(),
            dtype=dtype,
            device=CPU,
            seed=seed,
            experts=experts,
            context=context,
        )
        for stage in even_stages(num_layers=model.num_layers, num_stages=num_stages)
    ]


def run_stages(modules, batch):
    """The loss sum of one micro-batch, stage after stage in this process."""
    hidden = None
    depth = len(modules[-1].mtp.depths) if modules[-1].mtp else 0
    for module in modules:
        hidden = module(*batch, hidden, later=draw_later(batch, depth) if depth else None)
    return hidden


def draw_later(batch, depth):
    """Labels and mask further ahead, [depth, B, S] each, of rows that are one document each."""
    rows = [
        Row(tokens=t, labels=n, mask=m.astype(bool), documents=(len(t),))
        for t, n, m in zip(*(part.numpy() for part in batch), strict=True)
    ]
    labels, masks = zip(*(later_of(row, depth) for row in rows), strict=True)
    return tuple(torch.from_numpy(np.stack(part, axis=1)) for part in (labels, masks))
