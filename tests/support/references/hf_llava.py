"""Small random LLaVA and Qwen2-VL models of transformers in float64, and the loop that anyone would write around them.

The import takes seconds, so functions do it: ranks import this module too.
"""

from math import prod

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from raymega.data.samples import open_samples
from raymega.optim.lr_schedule import learning_rate
from tests.support.references.hf_models import SIZES, in_float64
from tests.support.references.plain_training import STEPS

TOKEN = 258
"""Id of the image token."""
TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 12,
    "patch_size": 6,
}  # fmt: skip
QWEN_TOWER = {
    "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2, "patch_size": 3, "hidden_size": SIZES["hidden_size"],
}  # fmt: skip
KINDS = ("clip", "siglip", "qwen2_vl", "native")
"""Kinds of models; native is Qwen2-VL with images of several sizes."""
IMAGE_SIZE, MAX_PIXELS = 12, 216
PATCHES, SQUARE = 4, 6
"""Tokens of an image of one size, and height and width in pixels of what becomes one."""


def sizes_of(kind):
    """Fields of the vision section that config.json does not say."""
    if kind == "native":
        return {"image_size": 0, "max_pixels": MAX_PIXELS}
    return {"image_size": IMAGE_SIZE}


def grid_of(image):
    """Rows and columns of an image's tokens."""
    return image.shape[1] // SQUARE, image.shape[2] // SQUARE


def make_model(kind, seed=0):
    """A model whose every parameter is random: CLIP's tower before Llama, or SigLIP's before a tied Qwen2; or Qwen2-VL."""
    # what is not drawn below, such as buffers, is the same each time too
    torch.manual_seed(seed)
    model = _make(kind).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            # norms stay near 1, so that no layer is nearly off
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in name else 0.0))
    return model


def _make(kind):
    import transformers as hf

    if is_qwen2_vl(kind):
        # heads of 3 pairs: one of time, one of the row, one of the column
        rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 1]}
        config = hf.Qwen2VLConfig(
            text_config={**SIZES, "rope_parameters": rope}, vision_config=QWEN_TOWER, image_token_id=TOKEN,
            video_token_id=257, vision_start_token_id=256, vision_end_token_id=255,
        )  # fmt: skip
        return hf.Qwen2VLForConditionalGeneration(config)
    if kind in ("clip", "granite"):
        text, tower = hf.LlamaConfig(**SIZES), hf.CLIPVisionConfig(**TOWER)
        if kind == "granite":  # its factor on the stream is on images, too
            text = hf.GraniteConfig(**SIZES, embedding_multiplier=3.0, tie_word_embeddings=True)
        options = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    else:
        text = hf.Qwen2Config(**SIZES, tie_word_embeddings=True)
        tower = hf.SiglipVisionConfig(**TOWER, vision_use_head=False)
        options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config = hf.LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=TOKEN, image_seq_length=PATCHES,
        tie_word_embeddings=text.tie_word_embeddings, **options,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def is_qwen2_vl(kind):
    """True if the model is Qwen2-VL."""
    return kind in ("qwen2_vl", "native")


def load_model(folder, kind):
    """Load a folder with the class of transformers that made it."""
    import transformers as hf

    made = (
        hf.Qwen2VLForConditionalGeneration
        if is_qwen2_vl(kind)
        else hf.LlavaForConditionalGeneration
    )
    return made.from_pretrained(folder, dtype="auto").eval()


def logits(model, tokens, images, vision):
    """Logits [1, S, V] of tokens [1, S] with images [3, height, width] uint8 in the order of their tokens."""
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (vision.image_mean, vision.image_std)
    )
    pixels = [(torch.tensor(image).double() / 255 - mean) / std for image in images]
    with in_float64(model):
        if vision.kind != "qwen2_vl":
            given = {"pixel_values": torch.stack(pixels)} if pixels else {}
            return model(input_ids=tokens, use_cache=False, **given).logits
        # angles of rows and columns were made in float32, as those of text
        turns = model.model.visual.rotary_pos_emb
        for name, angles in type(turns)(turns.config).named_buffers():
            setattr(turns, name, angles)
        given = _as_patches(pixels, vision) if pixels else {}
        kinds, grids = (tokens == TOKEN).int(), [*map(grid_of, images)]
        positions = _positions(tokens[0], grids)
        if _has_neighbours(tokens[0], len(images)):
            # transformers takes images without a token between them for one, and fails
            given["position_ids"] = positions[:, None]
        else:
            found, _ = model.model.get_rope_index(tokens, kinds, given.get("image_grid_thw"))
            assert (found[:, 0] == positions).all()
        return model(input_ids=tokens, mm_token_type_ids=kinds, use_cache=False, **given).logits


def _has_neighbours(tokens, num_images):
    """Return whether an image of a row follows another at once."""
    runs = "".join("i" if token == TOKEN else " " for token in tokens.tolist()).split()
    return len(runs) < num_images


def _positions(tokens, grids):
    """Time, row and column of each token of a row, [3, S], token by token as Qwen2-VL's paper says."""
    found, position, patch, left = [], 0, 0, iter(grids)
    rows = columns = 1
    for token in tokens.tolist():
        if token != TOKEN:
            found.append((position,) * 3)
            position += 1
            continue
        rows, columns = (rows, columns) if patch else next(left)
        found.append((position, position + patch // columns, position + patch % columns))
        patch = (patch + 1) % (rows * columns)
        position += max(rows, columns) if patch == 0 else 0
    return torch.tensor(found).t()


def _as_patches(pixels, vision):
    """Pixels as Qwen2-VL's processor gives them: patches of both frames, square after square."""
    edges = (-1, vision.spatial_merge_size, vision.patch_size)
    patches, sizes = [], []
    for image in pixels:
        cut = image.unflatten(2, edges).unflatten(1, edges)
        # colour, then rows and columns in three steps each
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :].expand(*[-1] * 5, 2, -1, -1)
        patches.append(cut.flatten(4).flatten(0, 3))
        sizes.append([1, *(edge // vision.patch_size for edge in image.shape[1:])])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(sizes)}


def _document_losses(model, row, vision):
    """Losses of a row's documents, each read alone; the images of a document are those of its tokens, in order."""
    # documents and their images lie end to end
    begin, seen = 0, 0
    for length in row.documents:
        here = slice(begin, begin + length)
        tokens = torch.from_numpy(row.tokens[here].copy())[None]
        left, images = int((tokens == TOKEN).sum()), []
        while left:
            images.append(row.images[seen + len(images)]())
            left -= prod(grid_of(images[-1]))
        # torch leaves out labels of -100
        labels = torch.from_numpy(np.where(row.mask, row.labels, -100)[here])
        found = logits(model, tokens, images, vision)[0]
        yield cross_entropy(found, labels, reduction="sum")
        begin, seen = begin + length, seen + len(images)
    assert seen == len(row.images), "each image has its tokens"


def train_plainly(model, plan):
    """Losses and norms of the parameters of ``model`` that a gradient reaches, and are to be trained."""
    section, size = plan.job.optimizer, plan.batch.global_batch_size
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if (p.ndim > 1) is is_matrix], "weight_decay": decay}
            for is_matrix, decay in ((True, section.weight_decay), (False, 0.0))
        ],
        betas=(section.beta1, section.beta2),
        eps=section.eps,
    )
    samples, curve, counts, grids = open_samples(plan.job), [], set(), set()
    for step in range(STEPS):
        rows = [samples.row(number) for number in range(step * size, (step + 1) * size)]
        counts |= {len(row.images) for row in rows}
        grids |= {grid_of(image()) for row in rows for image in row.images}
        count = sum(int(row.mask.sum()) for row in rows)
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            for loss in _document_losses(model, row, plan.job.model.vision):
                (loss / count).backward()
                total += float(loss.detach()) / count
        # blocks behind the projected one have no gradient
        reached = [p for _, p in named if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reached])))
        for param in reached:
            param.grad *= min(1.0, section.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
        optimizer.step()
        curve.append((total, norm))
    assert len(grids) > 5 or not plan.job.model.vision.max_pixels, "images have several sizes"
    assert {0, 1, 2, 3} <= counts or len(counts) > 3, "rows have no, one and several images"
    return curve
