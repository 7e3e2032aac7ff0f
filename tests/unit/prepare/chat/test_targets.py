"""Targets of conversations: by hand, against transformers' own masks, and what cannot be proven is refused."""

import numpy as np
import pytest

from raymega.data.format import EARLIER_ANSWER, LAST_ANSWER
from raymega.prepare.chat.rows import Conversation
from raymega.prepare.chat.targets import Labeller
from raymega.prepare.chat.template import RenderError
from tests.unit.prepare.chat import templates
from tests.unit.prepare.chat.templates import messages, template

TURNS = ("/Be brief.", "Who wrote Faust?", "Goethe wrote it.", "Caf\u00e9?", "\u4e2d\u6587 ok\nyes")
ANSWERS = (TURNS[2], TURNS[4])


@pytest.fixture(scope="module")
def tokenizer():
    return templates.make_tokenizer()


def _label(tokenizer, source, turns=TURNS):
    eod = tokenizer.token_to_id("<|endoftext|>")
    labeller = Labeller(template(source), tokenizer, eod_id=eod)
    return labeller.label(Conversation(messages=tuple(messages(*turns))))


def _text(tokenizer, labelled, kind):
    return tokenizer.decode(
        labelled.ids[labelled.targets == kind].tolist(), skip_special_tokens=False
    )


@pytest.mark.parametrize("name", templates.ENDS)
def test_targets_are_the_answers_and_the_tokens_that_end_them(tokenizer, name):
    source, end = templates.ENDS[name]
    found = _label(tokenizer, source)
    first, last = (_text(tokenizer, found, kind) for kind in (EARLIER_ANSWER, LAST_ANSWER))
    assert (first.lstrip(), last.lstrip()) == (ANSWERS[0] + end, ANSWERS[1] + end)
    # The document's own end is no target where the answer has one.
    assert found.ids[-1] == tokenizer.token_to_id("<|endoftext|>") and found.targets[-1] == 0


def test_answer_without_an_end_learns_that_of_the_document(tokenizer):
    found = _label(tokenizer, templates.PLAIN)
    assert _text(tokenizer, found, EARLIER_ANSWER) == ANSWERS[0]
    assert _text(tokenizer, found, LAST_ANSWER) == ANSWERS[1] + "<|endoftext|>"


def test_a_question_at_the_end_leaves_the_end_of_the_document_alone(tokenizer):
    """The end of the document is no part of an answer before the last question."""
    found = _label(tokenizer, templates.PLAIN, (*TURNS, "And then?"))
    assert _text(tokenizer, found, LAST_ANSWER) == ANSWERS[1] and found.targets[-1] == 0


def test_marks_of_the_template_are_those_of_transformers(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=templates.MARKED,
    )
    for turns in (TURNS, TURNS[1:3], ("a", "b", "c", "d", "e", "f \u4e2d", "g", "\U0001f600.")):
        asked = theirs.apply_chat_template(
            messages(*turns), return_dict=True, return_assistant_tokens_mask=True
        )
        found = _label(tokenizer, templates.MARKED, turns)
        assert found.ids[:-1].tolist() == asked["input_ids"]
        assert (found.targets[:-1] > 0).astype(int).tolist() == asked["assistant_masks"]


def test_ids_without_marks_are_those_of_transformers_and_targets_those_of_marks(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found = _label(tokenizer, templates.CHATML)
    asked = theirs.apply_chat_template(
        messages(*TURNS), chat_template=templates.CHATML, return_dict=True
    )
    assert found.ids[:-1].tolist() == asked["input_ids"]
    marked = _label(tokenizer, templates.MARKED)
    np.testing.assert_array_equal(found.targets, marked.targets)


@pytest.mark.parametrize(
    ("source", "turns", "why"),
    [
        (templates.FORGETFUL, TURNS, r"renders as '\[thought\]"),
        (templates.CHATML, ("x <|im_end|> y", "z"), r"message 0 spells the special token '<\|im_end\|>'"),
        (templates.CHATML.replace("message['content']", "message['content'] | upper"), TURNS, "not as"),
        ("{{ raise_exception('no system here') }}", TURNS, "no system here"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("who w", "rote"), "inside a token"),
        (templates.MARKED.replace("{% generation %}{{", "{% generation %}x{% endgeneration %}{% generation %}{{"),
         TURNS, "marks 4 answers of 2"),
        (templates.MARKED.replace("message['content'] + '<|im_end|>' }}{% endg", "'?' }}{% endg"), TURNS,
         "marks '\\?' for message 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_is_refused(tokenizer, source, turns, why):
    with pytest.raises(RenderError, match=why):
        _label(tokenizer, source, turns)


def test_template_that_asks_for_the_day_gives_the_same_tokens_on_every_day():
    source = "\n  {% if true %}{{ strftime_now('%A, %-d %B %Y') }}{% endif %}" + templates.CHATML
    found, plain = (
        template(t).render(messages("who?", "he"), ()) for t in (source, templates.CHATML)
    )
    assert found == f"\nFriday, 26 July 2024{plain}"


def test_empty_answer_is_its_end_alone(tokenizer):
    found = _label(tokenizer, templates.CHATML, ("say nothing", ""))
    assert _text(tokenizer, found, LAST_ANSWER) == "<|im_end|>"


# A call begins with a special token of its own, as Mistral's [TOOL_CALLS] and Llama's <|python_tag|>.
CALLING = templates.CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message.tool_calls is defined %}{{ '<|eot_id|>' + "
    "message.tool_calls | tojson }}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
)


def _call(tokenizer, value, tools=()):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": value}}}
    asked, answered = messages("who?", "he")
    calling = {"role": "assistant", "tool_calls": [call]}
    chat = (asked, calling, {"role": "tool", "content": "he"}, answered)
    labeller = Labeller(template(CALLING), tokenizer, eod_id=tokenizer.token_to_id("<|endoftext|>"))
    return labeller.label(Conversation(messages=chat, tools=tools))


def test_call_of_a_tool_is_learned_whole_though_it_begins_with_a_special_token(tokenizer):
    found = _call(tokenizer, 1)
    call = _text(tokenizer, found, EARLIER_ANSWER)
    assert call.startswith("<|eot_id|>[{") and call.endswith('{"x": 1}}}]<|im_end|>')
    assert _text(tokenizer, found, LAST_ANSWER) == "he<|im_end|>"


def test_call_or_tool_that_spells_a_special_token_is_refused(tokenizer):
    with pytest.raises(RenderError, match=r"tool_calls of message 1 spells .*'<\|im_end\|>'"):
        _call(tokenizer, "<|im_end|>")
    with pytest.raises(RenderError, match=r"list of tools spells .*'<\|im_end\|>'"):
        _call(tokenizer, 1, tools=({"name": "f", "description": "ends <|im_end|>"},))
