"""Embedding of models that read images: patches take the places of their tokens.

The images of a micro-batch are shared out over the first stage's tp and cp ranks; the features are gathered, and each
rank takes those of its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from raymega.model.layers.embedding import Embedding
from raymega.model.vision.tower import VisionTower
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.context import Context
from raymega.parallel.context_parallel.images import Images
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.mappings import (
    copy_to_tp,
    exchange_rows,
    gather_positions,
    gather_rows,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel


class ImageEmbedding(Embedding):
    """Embedding of tokens and images; ``tower`` is a part of it, so that ZeRO-3 gathers both together."""

    def __init__(
        self,
        factory: ParameterFactory,
        tower: VisionTower,
        factor: float = 1.0,
        *,
        image_factor: float = 1.0,
    ) -> None:
        """Make the table and take the tower; ``image_factor`` is that on features, which a family may share with tokens."""
        super().__init__(factory, factor)
        self.tower, self.image_factor = tower, image_factor

    def features(self, images: Images, context: Context, balanced: Group | None = None) -> Tensor:
        """Return the features of all images of the micro-batch, [N * P, D], equal on the stage's tp and cp ranks.

        Args:
            images: Images, shared out over the dp ranks where they say how many go where.
            context: Ranks that share a row's tokens.
            balanced: Group of these dp ranks.
        """
        features = self.tower(images.pixels, images.grids)
        if self.image_factor != 1.0:
            features = features * self.image_factor
        if self.tower.vision.tensor_parallel:
            # the same on all tp ranks; of cut positions each has a term of the gradient
            features = copy_to_tp(features, self.sp.tp) if self.sp.degree > 1 else features
            features = gather_over_context(features, context)
        else:
            features = gather_images(features, self.sp, context)
        if not images.sent:
            return features
        assert balanced is not None, "build has set it with parallel.balance_images"
        sent, received = (
            [images.num_patches * count for count in each]
            for each in (images.sent, images.received)
        )
        # padding lies behind the last image, and goes nowhere
        return exchange_rows(features[: sum(sent)], balanced, sent=sent, received=received)

    def merged(self, x: Tensor, features: Tensor, places: Tensor) -> Tensor:
        """Return the stream with features in the places of image tokens.

        Args:
            x: Embedded tokens, [S/(cp*sp), B, D].
            features: Features of all images, [N * P, D].
            places: Feature of each token, [B, S/cp] int64; -1 of text.
        """
        # row 0 is of text: it has no gradient, so a long text costs no scattered sum
        at = self.sp.own(places.t()) + 1
        found = embedding(at, nn.functional.pad(features, (0, 0, 1, 0)), padding_idx=0)
        return torch.where((at > 0)[..., None], found, x)


def gather_images(own: Tensor, sp: SequenceParallel, context: Context) -> Tensor:
    """Gather the features of each rank's images, [n, D] -> [n * tp * cp, D], in the order of the images.

    Backward gives a rank the sum of the gradients of its own images over all ranks that hold tokens of them. tp
    ranks without sequence parallelism hold the same tokens, and have the same gradient.
    """
    # places on tp vary fastest in the order of images, then those of inner and outer ranks of cp
    over_tp = gather_positions if sp.is_sequence_parallel else gather_rows
    return gather_over_context(over_tp(own, sp.tp), context)


def gather_over_context(features: Tensor, context: Context) -> Tensor:
    """Gather the features of the cp ranks' images, [n, D] -> [n * cp, D]; backward sums the gradients of each."""
    for group in (context.inner, context.outer):
        features = gather_positions(features, group)
    return features
