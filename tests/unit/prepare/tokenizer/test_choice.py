import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from raymega.errors import ConfigError
from raymega.prepare.tokenizer.choice import TokenizerOptions, choose_tokenizer, make_tokenizer
from raymega.prepare.tokenizer.encoder import Encoder
from tests.unit.prepare.tokenizer.files import TEXT, write_llama3_like


def _choose(name, **options):
    return choose_tokenizer(TokenizerOptions(name=str(name), **options))


def _make(name, sample=(TEXT,), **options):
    return make_tokenizer(_choose(name, **options), list(sample))


def _ids(made, text):
    return Encoder(made.json, made.rules).encode_batch([text]).tokens.tolist()


def test_bytes_tokens_are_the_bytes_and_256_ends():
    made = _make("bytes")
    assert (made.vocab_size, made.rules.eod_id, made.rules.bos_id) == (257, 256, -1)
    text = TEXT + "".join(map(chr, range(0x180)))
    assert _ids(made, text) == [*text.encode(), 256]


def test_bpe_is_trained_to_size_and_gives_the_text_back():
    made = _make("bpe:270")
    assert made.vocab_size == 270
    tokens = _ids(made, TEXT)
    assert tokens[-1] == made.rules.eod_id and len(tokens) < len(TEXT)
    assert Tokenizer.from_str(made.json).decode(tokens[:-1]) == TEXT


def test_made_tokenizers_are_the_same_each_time_and_in_recipes_by_name_alone():
    assert _make("bpe:270") == _make("bpe:270")
    assert _choose("bpe:270").recipe == {"tokenizer": "bpe:270"} and _choose("bpe:270").is_trained
    assert _choose("bytes").recipe == {"tokenizer": "bytes"} and not _choose("bytes").sample_bytes


@pytest.mark.parametrize("name", ["bytes", "bpe:270"])
def test_text_cannot_end_its_document(name):
    made = _make(name)
    tokens = _ids(made, "a<|endoftext|>b")
    assert tokens.index(made.rules.eod_id) == len(tokens) - 1


def test_file_without_settings_ends_by_endoftext_and_is_kept_byte_for_byte(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(_make("bpe:270").json)
    first = _choose(path).recipe
    assert _make(path).json == path.read_text() and _make(path).meta.eod_token == "<|endoftext|>"
    # Recipes of datasets that were prepared before there were settings have the same entries.
    assert list(first) == ["tokenizer"] and first["tokenizer"].startswith("file:")
    path.write_text(_make("bytes").json)
    assert _choose(path).recipe != first


def test_end_is_the_settings_eos_token_whatever_its_text(tmp_path):
    folder = write_llama3_like(tmp_path / "t")
    made = _make(folder)
    end = Tokenizer.from_str(made.json).token_to_id("<end>")
    assert (made.meta.eod_token, made.rules.eod_id) == ("<end>", end)
    assert _make(folder / "tokenizer.json") == made
    assert _choose(folder).recipe["eod_token"] == "<end>"
    assert _make(folder, eod_token="<turn>").meta.eod_token == "<turn>"


def test_another_end_is_refused_for_a_template_that_ends_turns_by_the_models_own(tmp_path):
    """A dataset's tokenizer has one eos_token, so its turns would end by the other token."""
    folder = write_llama3_like(tmp_path / "t")
    (folder / "chat_template.jinja").write_text("{{ messages }}{{ eos_token }}")
    with pytest.raises(
        ConfigError, match=r"'<turn>' with a chat template that writes eos_token, which is '<end>'"
    ):
        _make(folder, row_format="chat", eod_token="<turn>")
    assert _make(folder, row_format="chat", eod_token="<end>").meta.eod_token == "<end>"
    (folder / "chat_template.jinja").write_text("{{ messages }}<end>")
    assert _make(folder, row_format="chat", eod_token="<turn>").meta.eod_token == "<turn>"


def test_special_tokens_map_names_the_end_where_the_settings_do_not(tmp_path):
    folder = write_llama3_like(tmp_path / "t", eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<turn>"}}')
    assert _make(folder).meta.eod_token == "<turn>"


def test_begin_is_there_only_when_asked_and_never_twice(tmp_path):
    folder = write_llama3_like(tmp_path / "t")
    plain, begun = _make(folder), _make(folder, add_bos=True)
    begin = Tokenizer.from_str(plain.json).token_to_id("<begin>")
    # The post-processor of the file begins every text; the documents' rule decides.
    assert begin not in _ids(plain, "ab") and _ids(begun, "ab") == [begin, *_ids(plain, "ab")]
    parsed = _make(folder, add_bos=True, parse_special_tokens=True)
    assert _ids(parsed, "<begin>ab<end>") == _ids(begun, "ab")
    assert _ids(begun, "<begin>ab").count(begin) == 1
    recipes = [_choose(folder).recipe, _choose(folder, add_bos=True).recipe]
    assert recipes[1] == {**recipes[0], "bos_id": str(begin)}


def test_documents_of_bert_begin_with_its_first_token(tmp_path):
    """Settings of BERT have a cls_token, or, as those of published ones, none of the two."""
    folder = write_llama3_like(tmp_path / "t", bos_token=None, cls_token="<begin>")
    begun = _make(folder, add_bos=True)
    assert _ids(begun, "ab") == [Tokenizer.from_str(begun.json).token_to_id("<begin>"), *_ids(_make(folder), "ab")]  # fmt: skip
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}
    bert = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.add_special_tokens(["[CLS]", "[SEP]"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer.json").write_text(bert.to_str())
    (tmp_path / "b" / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert _ids(_make(tmp_path / "b", add_bos=True, eod_token="[SEP]"), "a") == [1, 3, 2]


def test_special_tokens_in_documents_are_text_unless_asked(tmp_path):
    folder = write_llama3_like(tmp_path / "t")
    plain, parsed = _make(folder), _make(folder, parse_special_tokens=True)
    turn = Tokenizer.from_str(plain.json).token_to_id("<turn>")
    assert turn not in _ids(plain, "a<turn>b<end>c") and turn in _ids(parsed, "a<turn>b")
    assert _ids(plain, "a<turn>b<end>c").count(plain.rules.eod_id) == 1
    assert _choose(folder, parse_special_tokens=True).recipe["special_tokens"] == "parsed"


def test_a_token_that_only_the_settings_call_special_is_special_too(tmp_path):
    folder = write_llama3_like(tmp_path / "t", eos_token="<eot>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<eot>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = _make(folder)
    assert _ids(made, "a<eot>b").count(made.rules.eod_id) == 1


def test_given_file_is_not_truncated(tmp_path):
    tokenizer = Tokenizer.from_str(_make("bpe:270").json)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "t.json"))
    assert len(_ids(_make(tmp_path / "t.json"), TEXT)) > 100


@pytest.mark.parametrize(
    "name, rule",
    [("bpe:256", "at least 257"), ("bpe:x", "at least 257"), ("none.json", "an existing file")],
)
def test_unknown_names_are_refused(name, rule):
    with pytest.raises(ConfigError, match=rule):
        _choose(name)


def test_files_that_cannot_serve_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("no json")
    with pytest.raises(ConfigError, match="must be a `tokenizers` JSON file"):
        _choose(path)
    path.write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(ConfigError, match=r"no settings name its eos_token.*--eod-token 'TOKEN'"):
        _choose(path)


def test_refusals_of_tokens_name_what_there_is(tmp_path):
    folder = write_llama3_like(tmp_path / "t", bos_token=None)
    with pytest.raises(
        ConfigError, match=r"'<none>' is not in its voc.*'<begin>', '<end>', '<turn>'"
    ):
        _choose(folder, eod_token="<none>")
    with pytest.raises(ConfigError, match=r"--add-bos .*name no bos_token"):
        _choose(folder, add_bos=True)
    with pytest.raises(ConfigError, match="must not be able to spell its end"):
        _choose(_word_level(tmp_path / "w.json"), eod_token="end")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json beside .* a list"):
        _choose(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is no tokenizer \(it holds nothing"):
        _choose(tmp_path / "empty")


def _word_level(path):
    """A tokenizer for which every word of its vocabulary is a token, special or not."""
    Tokenizer(models.WordLevel({"end": 0, "a": 1}, unk_token="a")).save(str(path))
    return path


def test_settings_load_the_file_as_it_is(tmp_path):
    folder = write_llama3_like(tmp_path / "t")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("stays behind")
    made = _make(folder)
    settings = json.loads(made.files["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in settings
    assert settings["model_max_length"] == 64 and settings["chat_template"] == "{{ messages }}"
    # Without a begin of its own, a document begins after the end of another.
    assert (settings["bos_token"], settings["add_bos_token"]) == ("<end>", False)
    assert set(made.files) == {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert made.meta.files == tuple(sorted(made.files))
