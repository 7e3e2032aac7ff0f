"""Pipeline stage of models that read images: the first one has the vision tower, as a part of its embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from raymega.config.schema import MemorySection, ModelSection
from raymega.model.attention.rope import Rope
from raymega.model.pipeline_stage import StageModule
from raymega.model.vision.embedding import ImageEmbedding
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.context import Rows, TokenLayout, whole_rows
from raymega.parallel.context_parallel.images import Images, image_axes
from raymega.parallel.core.host_copies import HostMemory


class VisionStage(StageModule):
    """Stage of a model that reads images; see :class:`StageModule`."""

    def __init__(self, model: ModelSection, stage: Any, **parts: Any) -> None:
        super().__init__(model, stage, **parts)
        self.vision = model.vision
        # set by build: dp ranks that share the images out, with parallel.balance_images
        self.balanced: Group | None = None

    def recompute(self, memory: MemorySection, host: HostMemory | None = None) -> None:
        """Choose what backward recomputes; full recompute is of the tower's blocks, too."""
        super().recompute(memory, host)
        if self.embedding is not None:
            self._image_embedding.tower.is_remade = memory.recompute == "full"

    def uses(self, *, is_backward: bool) -> Iterator[nn.Module]:
        """Yield the units in order of use; the tower's backward reads its weights."""
        yield from super().uses(is_backward=is_backward)
        if is_backward and self.embedding is not None:
            yield self.embedding

    def document_logits(self, tokens: Tensor, images: Images) -> Tensor:
        """Return this rank's columns of the logits, [S, 1, V/tp], of one document [S] on one stage and one cp rank."""
        # one row without padding, as an independent computation has it
        rows: Rows = whole_rows(len(tokens), tokens.device)._replace(images=images)
        if self.vision.mrope_section:
            axes = image_axes(images.places[0], (len(tokens),), images.grids, images.num_patches)
            rows = rows._replace(axes=axes[:, None])
        layout = self._token_layout(rows, torch.ones_like(tokens[None]), None)
        x = self._residual_stream(tokens[None], None, layout)
        assert self.head is not None, "only the last stage makes logits"
        self.before_use(self.head)
        return cast(Tensor, self.head(x))

    def _token_layout(self, rows: Rows, mask: Tensor, samples: Tensor | None) -> TokenLayout:
        layout = super()._token_layout(rows, mask, samples)
        if rows.axes is None or not isinstance(self.rope, Rope):
            return layout
        # of each axis its own feature pairs: cosines and sines are [S/cp, B, 1, K/2]
        by_axis = [self.rope.rotations(axis.t()) for axis in rows.axes.unbind()]
        cos, sin = (
            torch.cat(
                [
                    turns[part].split(self.vision.mrope_section, -1)[n]
                    for n, turns in enumerate(by_axis)
                ],
                -1,
            )
            for part in range(2)
        )
        return replace(layout, rotations=(cos, sin))

    @property
    def _image_embedding(self) -> ImageEmbedding:
        assert isinstance(self.embedding, ImageEmbedding), "the model's vision section has made it"
        return self.embedding

    def _residual_stream(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        token_layout: TokenLayout,
        token_types: Tensor | None = None,
    ) -> Tensor:
        images = token_layout.images
        if self.embedding is None or images is None:
            return super()._residual_stream(tokens, hidden, token_layout, token_types)
        self.before_use(self.embedding)
        own = self._image_embedding
        # before the tokens, so that the gather of features need not wait for the table
        features = own.features(images, token_layout.context, self.balanced)
        # NEFTune's noise is of the table's rows; features take their places behind it
        x = self.noise(own(tokens, token_layout.positions), token_layout)
        x = own.merged(x, self._used(own, features), images.places)
        x = self.embedding_dropout(x, token_layout.keys)
        return self._run_layers(x, token_layout)
