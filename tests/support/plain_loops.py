"""Evaluation protocols as plain loops over a model of transformers: what `raymega eval` is compared with.

The loops know windows, words and passages by the published protocols alone. They cost minutes of float64 on a
published model, so a result is kept in .test-all, by what it was computed from.
"""

import hashlib
import json
from math import exp
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from raymega.evaluate.tasks.wikitext import detokenise
from tests.support.references import hf_models

KEPT = Path(__file__).parents[2] / ".test-all" / "plain-loops"


def wikitext(model, raw, ids_of, limit, *, window, stride, batch_size):
    """Megatron-LM's perplexity of overlapping windows; of the first ``limit`` of them unless it is 0."""
    ids, num_words = ids_of(detokenise(raw)), len(raw.strip().split(" "))
    # the last window may be shorter; every token behind the first is a target once
    number = 1 + max(0, -(-(len(ids) - 1 - window) // stride))
    starts = [stride * each for each in range(min(number, limit or number))]
    parts = [torch.tensor(ids[start : start + window + 1]) for start in starts]
    total, count = 0.0, 0
    # the first window scores all its targets, so it is alone
    later = [parts[n : n + batch_size] for n in range(1, len(parts), batch_size)]
    for group in [parts[:1], *later]:
        is_even = len({*map(len, group)}) == 1
        for batch in [torch.stack(group)] if is_even else [part[None] for part in group]:
            logits = model(batch[:, :-1]).logits.transpose(1, 2)
            losses = cross_entropy(logits, batch[:, 1:], reduction="none")
            # later windows score what the window before did not see
            counted = losses if count == 0 else losses[:, window - stride :]
            total, count = total + float(counted.sum()), count + counted.numel()
    loss = total / count
    return {"loss": loss, "word_perplexity": exp(loss * (len(ids) - 1) / (num_words - 1))}


def lambada(model, lines, ids_of, limit, *, seq_len):
    """Accuracy and perplexity of the last words of the first ``limit`` passages, or of all; with each passage's."""
    right, log_probs = [], []
    for line in lines.splitlines()[: limit or None]:
        text = json.loads(line)["text"]
        word = text.split()[-1]
        # the last word with its space, tokenised apart, as the published protocol does
        before, target = ids_of(text[: text.rfind(word)].strip()), ids_of(f" {word}")
        inputs = torch.tensor([*before, *target])[:-1][-seq_len:]
        logits = model(inputs[None], logits_to_keep=len(target)).logits[0]
        target = torch.tensor(target)
        log_probs.append(float(logits.log_softmax(-1).gather(-1, target[:, None]).sum()))
        right.append(bool((logits.argmax(-1) == target).all()))
    return {
        "right": right,
        "log_probs": log_probs,
        "accuracy": sum(right) / len(right),
        "target_perplexity": exp(-sum(log_probs) / len(log_probs)),
    }


def both(folder, files, ids_of, *, limits, window, stride, seq_len, batch_size):
    """Return the results of both loops over the model in ``folder``, in float64 throughout.

    Args:
        folder: Model in Hugging Face's form.
        files: Long text, and passages.
        ids_of: Function from a text to its tokens.
        limits: Number of windows, and of passages; 0 is all.
        window: Number of tokens of a window.
        stride: Number of tokens by which a window moves on.
        seq_len: Largest number of inputs of a passage.
        batch_size: Number of windows that the model reads at once.
    """
    settings = {"limits": limits, "window": window, "stride": stride, "seq_len": seq_len}
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in (
        *sorted(folder.glob("*.safetensors")),
        folder / "config.json",
        *files,
        Path(__file__),
    ):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    # another model, text, setting or loop has another name
    kept = KEPT / f"{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        model = hf_models.load_model(folder).double()
        raw, lines = (file.read_text(encoding="utf-8") for file in files)
        with hf_models.in_float64(model), torch.no_grad():
            found = wikitext(
                model, raw, ids_of, limits[0], window=window, stride=stride, batch_size=batch_size
            ) | lambada(model, lines, ids_of, limits[1], seq_len=seq_len)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())
