"""The counts of WikiText's test file that published word perplexities depend on.

RAYMEGA_TEST_SETS=FOLDER names the folder with `wikitext2_test.txt`, which has the text of WikiText-103's test file too.
"""

import pytest

from raymega.evaluate.tasks.task import Settings
from raymega.evaluate.tasks.wikitext import detokenise, wikitext
from raymega.evaluate.tokenizer import tokenizer_in
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from tests.support import published, smollm2

pytestmark = pytest.mark.wide

NUM_WORDS, NUM_WORDS_DETOKENISED, NUM_TOKENS = 245_566, 201_644, 278_365
"""Words of the raw file (T_o) and of the detokenised text, and GPT-2's tokens of the latter (T)."""
WINDOW, STRIDE = 1024, 32


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    if not smollm2.has_test_sets():
        pytest.skip(f"{smollm2.SETS} is not set to the folder of the published test files")
    return smollm2.text_files(tmp_path_factory.mktemp("unused"))[0]


def test_words_are_those_of_the_raw_file(file):
    raw = file.read_text(encoding="utf-8")
    assert len(raw.strip().split(" ")) == NUM_WORDS
    assert len(detokenise(raw).strip().split(" ")) == NUM_WORDS_DETOKENISED


def test_tokens_and_windows_are_those_of_gpt2(file, tmp_path):
    path = published.write_gpt2(tmp_path)
    made = make_tokenizer(choose_tokenizer(TokenizerOptions(name=str(path))), [])
    settings = Settings(seq_len=WINDOW, stride=STRIDE, limit=0)
    questions = wikitext(file, tokenizer_in(made.files, "GPT-2"), settings)
    assert questions.words == NUM_WORDS
    assert f"{NUM_TOKENS:,} tokens" in questions.notes[0]
    # each token behind the first is a target once, in all windows together
    assert sum(request.num_targets for request in questions.requests) == NUM_TOKENS - 1
