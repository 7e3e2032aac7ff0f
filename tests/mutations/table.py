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


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="norm counts replicas of tensor-parallel ranks",
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
        name="batches are dealt out by rank in blocks of the wrong rank",
        file="plan/batch.py",
        old="start = (micro_batch * self.dp + dp_rank) * self.micro_batch_size",
        new="start = micro_batch * self.dp * self.micro_batch_size",
        layout=Layout(dp=2),
    ),
)
