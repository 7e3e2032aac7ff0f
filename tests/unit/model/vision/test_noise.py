"""NEFTune with images: noise is of the token table's rows, and an image's features have none."""

import torch

from raymega.data.images.image_batch import ImageShare
from raymega.data.images.image_rows import ImageRows
from raymega.data.loader import Loader
from raymega.plan.batch import make_batch
from tests.unit.data.images.test_image_rows import DOCUMENTS, TOKEN, VISION, _plain
from tests.unit.model.parts import make_stage_modules
from tests.unit.model.vision.test_tower import MODEL


class _Rows:
    seq_len = sum(DOCUMENTS)

    def row(self, number, /):
        return ImageRows(vision=VISION, name="test", is_drawn=True).row(_plain(number), number)


def _stream(alpha, batch):
    """The input of the first block in training, [S, B, D]."""
    update = {
        "vision": VISION, "vocab_size": TOKEN + 1, "max_positions": sum(DOCUMENTS), "neftune_noise_alpha": alpha,
    }  # fmt: skip
    (module,) = make_stage_modules(MODEL.model_copy(update=update))
    seen = []
    module.layers["0"].register_forward_pre_hook(lambda _block, given: seen.append(given[0]))
    module.run(batch, None)
    return seen[0]


def test_features_of_images_have_no_noise_and_tokens_of_text_have():
    share = ImageShare(vision=VISION, index=0, size=1)
    loader = Loader(_Rows(), dp_rank=0, device="cpu", images=share)
    batch = make_batch(global_batch_size=4, micro_batch_size=4, dp=1)
    (micro,) = loader.micro_batches(batch, 0)
    is_image = (micro.tokens == TOKEN).t()
    assert 0 < int(is_image.sum()) < is_image.numel()
    plain, noisy = _stream(0.0, micro), _stream(5.0, micro)
    differs = (plain != noisy).any(-1)
    assert torch.equal(differs, ~is_image)
