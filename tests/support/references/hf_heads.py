"""Small random classifiers of transformers in float64, and the training loop that anyone would write around them."""

import importlib

import numpy as np
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from raymega.data.samples import open_samples
from raymega.optim.lr_schedule import learning_rate
from tests.support.references import hf_encoders, hf_models

LLAMA = {**hf_models.SIZES, "rope_parameters": hf_models.LLAMA3_ROPE, "pad_token_id": None}
BERT = {**hf_encoders.SIZES, "pad_token_id": None, "attn_implementation": "eager"}
KINDS = {
    "llama-sequence": ("llama", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 3}),
    "llama-tokens": ("llama", "LlamaForTokenClassification", {**LLAMA, "num_labels": 4}),
    "llama-number": ("llama", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 1, "problem_type": "regression"}),
    "llama-reward": ("llama", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 1}),
    "qwen2_moe-sequence": (
        "qwen2_moe", "Qwen2MoeForSequenceClassification",
        {**hf_models.EXPERTS["qwen2_moe"][1], "num_labels": 3, "pad_token_id": None},
    ),
    "gpt2-tokens": ("gpt2", "GPT2ForTokenClassification", {**hf_models.GPT2, "num_labels": 3, "summary_first_dropout": 0.0, "classifier_dropout": 0.0}),
    "bert-sequence": ("bert", "BertForSequenceClassification", {**BERT, "num_labels": 3}),
    "bert-tokens": ("bert", "BertForTokenClassification", {**BERT, "num_labels": 4}),
    "bert-choices": ("bert", "BertForMultipleChoice", BERT),
    "megatron-choices": ("megatron_bert", "MegatronBertForMultipleChoice", BERT),
    "roberta-sequence": (
        "roberta", "RobertaForSequenceClassification",
        {**BERT, "pad_token_id": 1, "max_position_embeddings": 42, "num_labels": 2},
    ),
    "roberta-choices": (
        "roberta", "RobertaForMultipleChoice", {**BERT, "pad_token_id": 1, "max_position_embeddings": 42},
    ),
}  # fmt: skip


def make_model(kind, seed=0):
    """A model whose every parameter is random: no zero biases or unit norms to hide a mistake."""
    folder, name, fields = KINDS[kind]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(module, f"{name.partition('For')[0]}Config")(**fields)
    config._experts_implementation = "eager"
    model = getattr(module, name)(config).double().eval()
    # built-in tokens have the padding's id too: here it is a token as others
    if hasattr(model.base_model, "embeddings"):
        model.base_model.embeddings.word_embeddings.padding_idx = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, values in model.named_parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in path else 0.0))
    return model


def make_headless(seed=0):
    """A random BERT without a head or a pooler."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**BERT), add_pooling_layer=False).double().eval()
    model.embeddings.word_embeddings.padding_idx = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, values in model.named_parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in path else 0.0))
    return model


def load_model(kind, folder):
    """Load a folder with the class of transformers that made it."""
    place, name, fields = KINDS[kind]
    module = importlib.import_module(f"transformers.models.{place}.modeling_{place}")
    more = {"attn_implementation": "eager"} if "attn_implementation" in fields else {}
    model = getattr(module, name).from_pretrained(folder, dtype="auto", **more)
    model.config._experts_implementation = "eager"  # their grouped product has no float64
    return model.eval()


def scores(model, tokens):
    """Logits of one document [S] in float64 throughout: [C], or [S, C] of a class for tokens."""
    ids, more = tokens[None], {}
    if model.config.model_type == "roberta":  # positions begin behind the padding's row
        more = {"position_ids": torch.arange(2, 2 + len(tokens))[None]}
    if type(model).__name__.endswith("MultipleChoice"):  # a question of one choice
        ids, more = ids[None], {name: each[None] for name, each in more.items()}
    with hf_models.in_float64(model):
        return model(input_ids=ids, **more).logits[0]


def documents(row, *, is_causal):
    """Tokens, labels and mask of each document; padding is read by encoders alone, where a document is short."""
    starts = np.cumsum([0, *row.documents])
    for number, length in enumerate(row.lengths):
        end = starts[number] + (length if is_causal else row.documents[number])
        here = slice(starts[number], end)
        yield tuple(
            torch.from_numpy(np.array(each[here])) for each in (row.tokens, row.labels, row.mask)
        )


def losses(model, row, job):
    """The published losses of a row's groups, each a scalar, and the scores of all its documents."""
    is_causal = job.model.family in ("llama", "qwen2", "gpt2")
    found, per_token = [], []
    for tokens, labels, mask in documents(row, is_causal=is_causal):
        each = scores(model, tokens)
        found.append(each)
        if job.model.head.kind == "token_classification":
            wanted = labels.masked_fill(~mask, -100)
            per_token += list(cross_entropy(each, wanted, reduction="none")[mask])
    kind, pairs = job.model.head.kind, job.preference
    if kind == "token_classification":
        return per_token, found
    each = torch.stack(found) if found else torch.zeros(0, 1)
    if kind == "sequence_classification":
        return list(cross_entropy(each, torch.from_numpy(row.classes), reduction="none")), found
    if kind == "multiple_choice":
        grouped = each.view(row.num_pairs, -1)
        return list(cross_entropy(grouped, torch.from_numpy(row.classes), reduction="none")), found
    if kind == "regression":
        return list((each[:, 0] - torch.from_numpy(row.classes)) ** 2), found
    # TRL's RewardTrainer.compute_loss
    chosen, rejected = each.view(-1, 2).unbind(1)
    loss = -logsigmoid(chosen - rejected - pairs.margin)
    loss = loss + pairs.center_rewards_coefficient * (rejected + chosen) ** 2
    return list(loss), found


def train_plainly(model, plan, num_steps):
    """Losses and norms of steps by torch.optim.AdamW: documents one by one, the mean over groups."""
    section = plan.job.optimizer
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    samples, curve, size = open_samples(plan.job), [], plan.batch.global_batch_size
    for step in range(num_steps):
        optimizer.zero_grad()
        rows = [samples.row(step * size + number) for number in range(size)]
        each = [loss for row in rows for loss in losses(model, row, plan.job)[0]]
        loss = torch.stack(each).mean()
        loss.backward()
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])))
        for param in params:
            param.grad *= min(1.0, section.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
        optimizer.step()
        curve.append((float(loss.detach()), norm))
    return curve
