"""Small random LLaVA and Qwen2-VL models of transformers in float64, and the loop that anyone would write around them.

The import takes seconds, so functions do it: ranks import this module too.
"""

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
KINDS = ("clip", "siglip", "qwen2_vl")
IMAGE_SIZE = 12
PATCHES = 4


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

    if kind == "qwen2_vl":
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


def load_model(folder, kind):
    """Load a folder with the class of transformers that made it."""
    import transformers as hf

    made = (
        hf.Qwen2VLForConditionalGeneration
        if kind == "qwen2_vl"
        else hf.LlavaForConditionalGeneration
    )
    return made.from_pretrained(folder, dtype="auto").eval()


def logits(model, tokens, images, vision):
    """Logits [B, S, V] of tokens [B, S] with images [N, 3, height, width] uint8 in the order of their tokens."""
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (vision.image_mean, vision.image_std)
    )
    pixels = (torch.as_tensor(images).double() / 255 - mean) / std if len(images) else None
    with in_float64(model):
        if vision.kind != "qwen2_vl":
            return model(input_ids=tokens, pixel_values=pixels, use_cache=False).logits
        # angles of rows and columns were made in float32, as those of text
        turns = model.model.visual.rotary_pos_emb
        for name, angles in type(turns)(turns.config).named_buffers():
            setattr(turns, name, angles)
        given = {} if pixels is None else _as_patches(pixels, vision)
        kinds = (tokens == TOKEN).int()
        if any(map(_has_neighbours, tokens)):
            # transformers takes images without a token between them for one, and fails
            given["position_ids"] = torch.stack([_positions(row, vision.edge) for row in tokens], 1)
        else:
            found, _ = model.model.get_rope_index(tokens, kinds, given.get("image_grid_thw"))
            assert (found[:, 0] == _positions(tokens[0], vision.edge)).all()
        return model(input_ids=tokens, mm_token_type_ids=kinds, use_cache=False, **given).logits


def _has_neighbours(tokens):
    """Return whether an image of a row follows another at once."""
    runs = "".join("i" if token == TOKEN else " " for token in tokens.tolist()).split()
    return any(len(run) > PATCHES for run in runs)


def _positions(tokens, edge):
    """Time, row and column of each token of a row, [3, S], token by token as Qwen2-VL's paper says."""
    found, position, patch = [], 0, 0
    for token in tokens.tolist():
        if token != TOKEN:
            found.append((position,) * 3)
            position += 1
            continue
        found.append((position, position + patch // edge, position + patch % edge))
        patch = (patch + 1) % edge**2
        position += edge if patch == 0 else 0
    return torch.tensor(found).t()


def _as_patches(pixels, vision):
    """Pixels as Qwen2-VL's processor gives them: patches of both frames, square after square."""
    edges = (vision.edge, vision.spatial_merge_size, vision.patch_size)
    cut = pixels.unflatten(3, edges).unflatten(
        2, edges
    )  # image, colour, then rows and columns in three steps each
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*[-1] * 6, 2, -1, -1)
    sizes = torch.tensor([[1, vision.grid, vision.grid]] * len(pixels))
    return {"pixel_values": cut.flatten(5).flatten(0, 4), "image_grid_thw": sizes}


def _document_losses(model, row, vision):
    """Losses of a row's documents, each read alone; the images of a document are those of its tokens, in order."""
    # documents and their images lie end to end
    begin, seen = 0, 0
    for length in row.documents:
        here = slice(begin, begin + length)
        tokens = torch.from_numpy(row.tokens[here].copy())[None]
        count = int((tokens == TOKEN).sum()) // PATCHES
        images = [image() for image in row.images[seen : seen + count]]
        # torch leaves out labels of -100
        labels = torch.from_numpy(np.where(row.mask, row.labels, -100)[here])
        found = logits(model, tokens, np.stack(images) if images else [], vision)[0]
        yield cross_entropy(found, labels, reduction="sum")
        begin, seen = begin + length, seen + count
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
    samples, curve, counts = open_samples(plan.job), [], set()
    for step in range(STEPS):
        rows = [samples.row(number) for number in range(step * size, (step + 1) * size)]
        counts |= {len(row.images) for row in rows}
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
    assert {0, 1, 2, 3} <= counts or len(counts) > 3, "rows have no, one and several images"
    return curve
