"""UpdateChunk: buckets updated together, element by element or, under Muon, as whole matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from raymega.config.schema import ModelSection, OptimizerSection, PluginsSection
from raymega.optim.bucket_state import BucketState, Member
from raymega.optim.muon import begin_muon, end_muon, orthogonalise
from raymega.optim.param_groups import Rates, rates_of
from raymega.optim.updates import ParamState, make_update_group, update_code
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import BucketTable
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.muon_gather import MuonGather
from raymega.parallel.data_parallel.quantized_scales import ScaleReducer
from raymega.plan.memory.optimizer_state import format_of, kinds_of, update_of

Opened = Mapping[tuple[str, Rates], Sequence[ParamState]]
"""Opened state of a chunk's members, grouped by (update, rates)."""


class UpdateChunk:
    """Update of several buckets: open the state of their members, update masters, close the state."""

    def __init__(  # noqa: PLR0913  # the optimizer is the one place that calls it
        self,
        bucket_state: Sequence[BucketState],
        table: BucketTable,
        section: OptimizerSection,
        model: ModelSection,
        groups: Groups,
        log: CommLog,
        plugins: PluginsSection,
    ) -> None:
        self._bucket_state, self._section = bucket_state, section
        self._groups: dict[tuple[str, Rates], list[Member]] = defaultdict(list)
        # group members by update and rates, for torch's multi-tensor kernels
        for member in (member for each in bucket_state for member in each.members):
            spec = member.param_state.param.spec
            rates = rates_of(
                spec.pieces[0].tensor, section, model
            )  # equal for all pieces of a fused one
            self._groups[update_of(section.name, spec.role), rates].append(member)
        # code of each element-wise update
        names = dict.fromkeys(name for name, _ in self._groups)
        self._codes = {name: update_code(section, plugins, name) for name in names}
        # Muon: matrices that span ranks are gathered
        buckets = [each.part.bucket for each in bucket_state]
        with_matrices = [b for b in buckets if any(map(self._is_whole, (p for p, _ in b.spans)))]
        self._matrices = None
        if with_matrices:
            self._matrices = MuonGather(table, with_matrices, groups, log)
        self._shared = ScaleReducer(buckets, groups, self._kinds_in_blocks, table.dtype, log)

    @torch.no_grad()
    def update(self, *, step: torch.Tensor, lr: float, divisor: torch.Tensor | None) -> None:
        """Make update ``step`` at ``lr``; gradients are divided by ``divisor`` in place."""
        # element-wise updates
        opened = {key: [m.open() for m in members] for key, members in self._groups.items()}
        for (name, rates), param_states in opened.items():
            update = self._codes[name]
            if update is not None:
                group = make_update_group(
                    param_states, step=step, lr=lr * rates.lr_scale,
                    weight_decay=rates.weight_decay, divisor=divisor,
                )  # fmt: skip
                update(group)
        # Muon: momentum now, step after the orthogonalisation; state is closed in between
        directions = self._directions(opened, divisor)
        self._close(opened)
        if self._matrices is not None:
            self._matrices.transform(directions, self._orthogonalise)
            self._follow(directions, lr=lr)

    def _directions(self, opened: Opened, divisor: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Update Muon's momentum, and return the flat direction of each bucket by its index."""
        muon = {key: members for key, members in self._groups.items() if key[0] == "muon"}
        buckets = {m.place.part.bucket.index for members in muon.values() for m in members}
        flats = {
            each.part.bucket.index: torch.empty_like(each.gradient)
            for each in self._bucket_state
            if each.part.bucket.index in buckets
        }
        for key, members in muon.items():
            begin_muon(opened[key], _of(members, flats), self._section, divisor)
        return flats

    def _orthogonalise(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        return orthogonalise(matrices, self._section.newton_schulz_steps)

    def _follow(self, directions: Mapping[int, torch.Tensor], *, lr: float) -> None:
        for (name, rates), members in self._groups.items():
            if name == "muon":
                end_muon(
                    [member.param_state for member in members],
                    _of(members, directions),
                    lr=lr * rates.lr_scale,
                    weight_decay=rates.weight_decay,
                )

    def _close(self, opened: Opened) -> None:
        """Store the state; scales of blocks that span ranks are reduced over these ranks first."""
        changed = [
            (kept, values)
            for key, members in self._groups.items()
            for member, param_state in zip(members, opened[key], strict=True)
            for kept, values in zip(member.kept, param_state.state, strict=True)
        ]
        # measure all, reduce over ranks once, then store all
        self._shared.forget()
        for kept, values in changed:
            kept.measure(values, self._shared)
        self._shared.combine()
        for kept, values in changed:
            kept.close(values, self._shared)

    def _is_whole(self, param: ShardedParameter) -> bool:
        return update_of(self._section.name, param.spec.role) == "muon"

    def _kinds_in_blocks(self, param: ShardedParameter) -> tuple[str, ...]:
        role = param.spec.role
        is_short = format_of(self._section, role) == "8bit"
        return kinds_of(self._section.name, role) if is_short else ()


def _of(members: Sequence[Member], flats: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return each member's view into the flat tensor of its bucket."""
    return [flats[m.place.part.bucket.index][m.within] for m in members]
