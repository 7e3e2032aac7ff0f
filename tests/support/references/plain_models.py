"""One-rank references: plain GPT-2 and Llama on whole weights, written without raymega's layers.

Layout is [B, S, ...] throughout, attention is the written-out softmax, RoPE is a complex product.
Also here: drawing whole weights, cutting them into sharded parameters, putting pieces together.
"""

import math

import torch
from torch.nn import functional

from raymega.box import Box
from raymega.config.schema import ModelSection


def make_model(family: str, **changes) -> ModelSection:
    """A tiny model whose sizes all differ and suit tp up to 4."""
    sizes = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_heads": 8,
        "num_kv_heads": "num_heads" if family == "gpt2" else 4,
        "head_dim": 10 if family == "qwen3" else "hidden_size / num_heads",
        "ffn_hidden_size": 80,
        "vocab_size": 52,
        "make_vocab_size_divisible_by": 8,
        "max_positions": 16,
    }
    return ModelSection(family=family, **{**sizes, **changes})


def draw_weights(tensors, seed=0) -> dict:
    """Random values for every tensor: no zero biases or unit norms that would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    return {t.name: 0.3 * torch.randn(t.shape, generator=generator).double() for t in tensors}


def draw_batch(model, *, batch=3, seq=7, seed=1):
    """tokens, labels, mask [B, S]; the last sequence is padding with labels outside the range."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, model.vocab_size, (batch, seq + 1), generator=generator)
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    mask = torch.ones(batch, seq, dtype=torch.float64)
    tokens[-1], mask[-1] = 0, 0
    labels[-1] = torch.arange(seq) * 1000 - 100
    mask[0, 2], labels[0, 2] = 0, -1
    return tokens, labels, mask


def loss_sum(model, weights, tokens, labels, mask):
    """Sum of unmasked token losses in training."""
    kept = mask.bool()
    scores = logits(model, weights, tokens)[kept]
    smoothing = model.label_smoothing
    losses = functional.cross_entropy(
        scores, labels[kept], reduction="sum", label_smoothing=smoothing
    )
    return losses + model.z_loss * scores.logsumexp(-1).square().sum()


def gradients(model, weights, batch) -> dict:
    """Gradient of the loss sum by every whole weight, and the loss itself as ``loss``.

    With multi-token prediction the gradient is of more than the loss, and ``mtp_loss`` is the rest.
    """
    leaves = {name: values.clone().requires_grad_() for name, values in weights.items()}
    loss = loss_sum(model, leaves, *batch)
    if model.num_nextn_predict_layers:
        further = further_loss_sum(model, leaves, *batch)
        (loss + model.mtp_loss_scaling_factor / model.num_nextn_predict_layers * further).backward()
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        return {"loss": loss.detach(), "mtp_loss": further.detach(), **grads}
    loss.backward()
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def further_loss_sum(model, weights, tokens, labels, mask):
    """Sum over depths of the losses further ahead, token by token along the rows."""
    total, x = 0.0, norm(model, weights, "final_norm", hidden(model, weights, tokens))
    seen = mask.bool()
    for depth in range(model.num_nextn_predict_layers):
        at, seq = f"mtp.{depth}", tokens.shape[1]
        read = torch.where(seen, labels, 0)
        token = norm(model, weights, f"{at}.token_norm", weights["embedding.tokens.weight"][read])
        both = torch.cat((token, norm(model, weights, f"{at}.hidden_norm", x)), -1)
        x = block(model, weights, at, linear(weights, f"{at}.join", both))
        x = norm(model, weights, f"{at}.final_norm", x)
        after, still = torch.zeros_like(labels), torch.zeros_like(seen)
        for row in range(len(labels)):
            for place in range(seq - 1):
                after[row, place] = labels[row, place + 1]
                still[row, place] = mask[row, place].bool() & seen[row, place + 1]
        labels, seen = after, still
        scores = (x @ head_weight(model, weights).T)[seen]
        total = total + functional.cross_entropy(scores, labels[seen], reduction="sum")
    return total


def logits(model, weights, tokens):
    """tokens: [B, S] -> [B, S, V]."""
    x = norm(model, weights, "final_norm", hidden(model, weights, tokens))
    return x @ head_weight(model, weights).T


def head_weight(model, weights):
    head = "embedding.tokens.weight" if model.tie_word_embeddings else "head.weight"
    return weights[head][: model.vocab_size]


def hidden(model, weights, tokens):
    """tokens: [B, S] -> [B, S, D] before the last norm."""
    x = weights["embedding.tokens.weight"][tokens]
    if model.family == "gpt2":
        x = x + weights["embedding.positions.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        x = block(model, weights, f"layers.{layer}", x)
    return x


def block(model, weights, at, x):
    """x: [B, S, D] -> the same."""
    x = x + attention(
        model, weights, f"{at}.attention", norm(model, weights, f"{at}.attention_norm", x)
    )
    return x + mlp(model, weights, f"{at}.mlp", norm(model, weights, f"{at}.mlp_norm", x))


def norm(model, weights, at, x):
    """LayerNorm or RMSNorm, from their definitions."""
    if model.family == "gpt2":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_eps)
    return x * weights[f"{at}.weight"] + weights.get(f"{at}.bias", 0.0)


def linear(weights, at, x):
    return functional.linear(x, weights[f"{at}.weight"], weights.get(f"{at}.bias"))


def attention(model, weights, at, x):
    """Each query head by itself: softmax over earlier positions of its kv head."""
    if model.mla.kv_lora_rank:
        return latent_attention(model, weights, at, x)
    seq, width = x.shape[1], model.head_width
    q, k, v = (linear(weights, f"{at}.{n}", x).unflatten(-1, (-1, width)) for n in "qkv")
    if model.family == "qwen3":
        q, k = norm(model, weights, f"{at}.q_norm", q), norm(model, weights, f"{at}.k_norm", k)
    if model.family != "gpt2":
        q, k = rotate(model, q), rotate(model, k)
    # causal: no query sees a later position
    later = torch.ones(seq, seq).triu(1).bool()
    heads = []
    for head in range(model.num_heads):
        kv_head = head // (model.num_heads // model.kv_heads)
        scores = q[:, :, head] @ k[:, :, kv_head].transpose(1, 2) / math.sqrt(width)
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, :, kv_head])
    return linear(weights, f"{at}.out", torch.cat(heads, -1))


def latent_attention(model, weights, at, x):
    """DeepSeek-V2's formulas 37 to 47, head by head; the turned part of keys is one for all heads."""
    mla, seq = model.mla, x.shape[1]
    down = linear(weights, f"{at}.kv_down", x)
    latent = norm(model, weights, f"{at}.kv_latent_norm", down[..., : mla.kv_lora_rank])
    # formula 43: one rotated key for all heads
    k_turned = rotate(model, down[..., None, mla.kv_lora_rank :])[:, :, 0]
    kv = linear(weights, f"{at}.kv_up", latent).unflatten(-1, (model.num_heads, -1))
    if mla.q_lora_rank:
        q_latent = norm(
            model, weights, f"{at}.q_latent_norm", linear(weights, f"{at}.q_down", x)
        )  # fmt: skip
        q = linear(weights, f"{at}.q_up", q_latent)
    else:
        q = linear(weights, f"{at}.q", x)
    # queries have a plain part and a rotated part for each head
    q = q.unflatten(-1, (model.num_heads, -1))
    q_turned = rotate(model, q[..., mla.qk_nope_head_dim :])
    scale = 1 / math.sqrt(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if model.rope_scaling == "yarn":
        scale *= (0.1 * model.rope_mscale_all_dim * math.log(model.rope_factor) + 1) ** 2
    later, heads = torch.ones(seq, seq).triu(1).bool(), []
    for head in range(model.num_heads):
        k_plain, v = kv[:, :, head].split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        scores = q[:, :, head, : mla.qk_nope_head_dim] @ k_plain.transpose(1, 2)
        scores = (scores + q_turned[:, :, head] @ k_turned.transpose(1, 2)) * scale
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v)
    return linear(weights, f"{at}.out", torch.cat(heads, -1))


def rotate(model, x):
    """RoPE of x: [B, S, heads, K] as a product of complex numbers x[i] + x[i + K/2] j, or with latent
    attention x[2 i] + x[2 i + 1] j."""
    width = x.shape[-1]
    half = width // 2
    positions = torch.arange(x.shape[1], dtype=torch.float64)
    speed = [_speed(model, model.rope_theta ** (-2 * i / width), i, width) for i in range(half)]
    angles = positions[:, None] * torch.tensor(speed, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angles, _stretch(model)), angles)[:, None]
    if model.mla.kv_lora_rank:
        y = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
        return torch.view_as_real(y).flatten(-2)
    y = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((y.real, y.imag), -1)


def _stretch(model):
    """YaRN's factor on turned features."""
    if model.rope_scaling != "yarn":
        return 1.0
    above, below = (
        0.1 * m * math.log(model.rope_factor) + 1
        for m in (model.rope_mscale, model.rope_mscale_all_dim)
    )
    return above / below


def _speed(model, plain, pair, width):
    """Llama 3's rule, case by case: short waves stay, long ones are stretched, others in part.

    YaRN's is the same along the numbers of the pairs.
    """
    if model.rope_scaling == "none":
        return plain
    if model.rope_scaling == "yarn":
        first, last = (
            width * math.log(model.rope_original_positions / (2 * math.pi * turns))
            / (2 * math.log(model.rope_theta))
            for turns in (model.rope_beta_fast, model.rope_beta_slow)
        )  # fmt: skip
        first, last = max(0, math.floor(first)), min(width - 1, math.ceil(last))
        stretched = min(1.0, max(0.0, (pair - first) / (last - first)))
        return plain * (1 - stretched) + plain / model.rope_factor * stretched
    # Llama 3: by the wave's length against the positions of pretraining
    wave, original = 2 * math.pi / plain, model.rope_original_positions
    if wave < original / model.rope_high_freq_factor:
        return plain
    if wave > original / model.rope_low_freq_factor:
        return plain / model.rope_factor
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    smooth = (original / wave - low) / (high - low)
    return (1 - smooth) * plain / model.rope_factor + smooth * plain


def mlp(model, weights, at, x):
    if model.family != "gpt2":
        gate = linear(weights, f"{at}.gate", x)
        return linear(
            weights, f"{at}.down", gate * torch.sigmoid(gate) * linear(weights, f"{at}.up", x)
        )
    h = linear(weights, f"{at}.up", x)
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return linear(weights, f"{at}.down", h)


def slices(box: Box) -> tuple[slice, ...]:
    """The block as an index."""
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


@torch.no_grad()
def fill(params, weights) -> None:
    """Give every sharded parameter its blocks of the whole weights."""
    for param in params:
        for piece in param.spec.pieces:
            param[slices(piece.local)] = weights[piece.tensor.name][slices(piece.box)].to(param)


def gradient_blocks(params) -> list:
    """(tensor name, box, gradient) of every piece that counts, of tied copies and of terms."""
    return [
        (piece.tensor.name, piece.box, param.grad[slices(piece.local)].clone())
        for param in params
        for piece in param.spec.pieces
        if piece.is_primary or param.spec.is_tied or piece.is_partial_over_tp
    ]


def assemble(weights, blocks) -> dict:
    """Whole tensors from blocks; blocks that overlap (tied copies, partial sums) add up."""
    whole = {name: torch.zeros_like(values) for name, values in weights.items()}
    for name, box, values in blocks:
        whole[name][slices(box)] += values
    return whole


def difference(value, wanted) -> float:
    """Largest difference, relative to max(1, largest wanted value); NaN counts as infinite."""
    value, wanted = torch.as_tensor(value).detach(), torch.as_tensor(wanted).detach()
    assert value.shape == wanted.shape, f"{tuple(value.shape)} is not {tuple(wanted.shape)}"
    gap = float((value.double() - wanted.double()).abs().max() / wanted.abs().max().clamp(min=1.0))
    return math.inf if math.isnan(gap) else gap
