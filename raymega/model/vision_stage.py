"""Pipeline stage of models that read images: the first one has the vision tower, as a part of its embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from raymega.config.schema import MemorySection
from raymega.model.pipeline_stage import StageModule
from raymega.model.vision.embedding import ImageEmbedding
from raymega.parallel.context_parallel.context import Rows, TokenLayout, whole_rows
from raymega.parallel.context_parallel.images import Images
from raymega.parallel.core.host_copies import HostMemory


class VisionStage(StageModule):
    """Stage of a model that reads images; see :class:`StageModule`."""

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
        layout = self._token_layout(rows, torch.ones_like(tokens[None]), None)
        x = self._residual_stream(tokens[None], None, layout)
        assert self.head is not None, "only the last stage makes logits"
        self.before_use(self.head)
        return cast(Tensor, self.head(x))

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
        features = own.features(images, token_layout.context)
        x = own.merged(
            own(tokens, token_layout.positions), self._used(own, features), images.places
        )
        x = self.embedding_dropout(self.noise(x, token_layout), token_layout.keys)
        return self._run_layers(x, token_layout)
