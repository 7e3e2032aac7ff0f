"""Planted mistakes in generated text, and the property of the text that then does not hold.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutations.saves import SaveMutation as GenerationMutation

GENERATION_MUTATIONS = (
    GenerationMutation(
        name="padding on the left is attended to, and counts in positions",
        file="generate/with_transformers.py",
        old="        mask[row, longest - len(prompt) :] = 1\n",
        new="        mask[row] = 1\n",
        caught="greedy text is another one",
    ),
    GenerationMutation(
        name="a row begins after a longer prompt than its own",
        file="generate/with_transformers.py",
        old="places = torch.full_like(self._numbers, input_ids.shape[1] - self._start)",
        new="places = torch.full_like(self._numbers, input_ids.shape[1])",
        caught="drawn text depends on its batch",
    ),
    GenerationMutation(
        name="a prompt's random numbers are those of its row in the batch",
        file="generate/with_transformers.py",
        old="chosen = choose_tokens(logits, ids, self._sampling, prompts=self._numbers, places=places)",
        new="rows = torch.arange(len(places))\n"
        "        chosen = choose_tokens(logits, ids, self._sampling, prompts=rows, places=places)",
        caught="drawn text depends on its batch",
    ),
    GenerationMutation(
        name="equal prompts draw equal numbers",
        file="parallel/tensor_parallel/token_choice.py",
        old="prompts.unsqueeze(-1), torch.zeros_like(prompts)[:, None])",
        new="torch.zeros_like(prompts)[:, None], torch.zeros_like(prompts)[:, None])",
        caught="two samples of a prompt are alike",
    ),
    GenerationMutation(
        name="every token of an answer draws the same numbers",
        file="parallel/tensor_parallel/token_choice.py",
        old="where = (ids, places.unsqueeze(-1),",
        new="where = (ids, torch.zeros_like(places)[:, None],",
        caught="shares over places are not the model's",
    ),
    GenerationMutation(
        name="the temperature is forgotten",
        file="parallel/tensor_parallel/token_choice.py",
        old="kept = logits.double() / sampling.temperature",
        new="kept = logits.double()",
        caught="shares over places are not the model's",
    ),
    GenerationMutation(
        name="top-p leaves out the token that reaches the share",
        file="parallel/tensor_parallel/token_choice.py",
        old="kept.masked_fill(before >= sampling.top_p",
        new="kept.masked_fill(before + probs >= sampling.top_p",
        caught="shares of top-p are not the model's",
    ),
    GenerationMutation(
        name="a stop string is looked for in the newest token alone",
        file="data/text_codec.py",
        old="before_stop(self._text(tokens, after), sampling.stop) is not None",
        new="before_stop(self._text(tokens[-1:], after), sampling.stop) is not None",
        caught="a stop string across tokens does not end an answer",
    ),
    GenerationMutation(
        name="the stop string stays in the text",
        file="plan/sampling.py",
        old="return text[: min(places)] if places else None",
        new="return text[: max(places) + 1] if places else None",
        caught="a stop string is part of the text",
    ),
    GenerationMutation(
        name="full recompute asks for the token before the last",
        file="train/sampling.py",
        old="        labels[len(text) - 1] = 1\n",
        new="        labels[max(len(text) - 2, 0)] = 1\n",
        caught="greedy text of full recompute is another one",
    ),
    GenerationMutation(
        name="full recompute keys its numbers by the place in the batch",
        file="train/sampling.py",
        old="prompts=torch.tensor(numbers)[at],",
        new="prompts=at,",
        caught="drawn text of full recompute is another one",
    ),
)
LENGTH = 40
"""Tokens that the model reads: the first answer ends before the others."""
TEXTS = ("the cat sat on a mat, and had its hat", "a", "she said that he", "a", "1 2 3")


def outcome(folder: Path) -> str:
    """Return ``sound``, or the first property that does not hold."""
    import torch

    from raymega.generate.prompts import Prompts
    from raymega.generate.run import GenerateOptions, prepare_generation
    from raymega.plan.sampling import Sampling

    wrong = _wrong_choice() or _wrong_end()
    if wrong:
        return wrong
    model, uri = _imported(folder)

    def ready(texts, sampling, batch_size):
        options = GenerateOptions(sampling=sampling, batch_size=batch_size)
        return prepare_generation(uri, Prompts(texts=texts), options)

    def answers(texts, sampling, batch_size):
        found = ready(texts, sampling, batch_size).run("", lambda *_: None)
        return [list(answer.tokens) for answer in found]

    # greedy: transformers' own text, a prompt at a time
    greedy, wanted = Sampling(max_tokens=6), []
    for text in TEXTS:
        prompt, limit = torch.tensor([list(text.encode())]), min(6, LENGTH - len(text))
        output = model.generate(prompt, do_sample=False, max_new_tokens=limit, pad_token_id=0)
        wanted.append(output[0, prompt.shape[1] :].tolist())
    if answers(TEXTS, greedy, 5) != wanted:
        return "greedy text is another one"
    # drawn: by prompt number and place alone
    drawn = Sampling(max_tokens=8, temperature=1.5)
    together = answers(TEXTS, drawn, 5)
    if together[1] == together[3]:
        return "two samples of a prompt are alike"
    if answers(TEXTS, drawn, 2) != together:
        return "drawn text depends on its batch"
    # the same by full recompute, on one rank; answers end one after the other
    if _recomputed(ready(TEXTS, greedy, 1), uri) != wanted:
        return "greedy text of full recompute is another one"
    if _recomputed(ready(TEXTS, drawn, 1), uri) != together:
        return "drawn text of full recompute is another one"
    return "sound"


def _wrong_choice() -> str:
    """Return what is wrong with the shares of drawn tokens."""
    import torch

    from raymega.parallel.tensor_parallel.token_choice import choose_tokens
    from raymega.plan.sampling import Sampling

    count = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    places = torch.arange(count)
    zeros = torch.zeros_like(places)

    def shares(sampling, **where):
        rows = logits.expand(count, -1), torch.arange(4).expand(count, -1)
        return torch.bincount(choose_tokens(*rows, sampling, **where), minlength=4) / count

    found = shares(Sampling(temperature=2.0), prompts=zeros, places=places)
    if (found - (logits / 2).softmax(-1)).abs().max() > 0.03:
        return "shares over places are not the model's"
    # 0.644, 0.237: the second one reaches 0.8
    found = shares(Sampling(temperature=1.0, top_p=0.8), prompts=zeros, places=places)
    cut = torch.tensor([2.0, 1.0, -torch.inf, -torch.inf]).softmax(-1)
    if (found - cut).abs().max() > 0.03:
        return "shares of top-p are not the model's"
    return ""


def _wrong_end() -> str:
    """Return what is wrong with the end of an answer."""
    from raymega.data.text_codec import TextCodec
    from raymega.plan.sampling import Sampling
    from raymega.prepare.tokenizer.trained import byte_tokenizer

    codec, sampling = TextCodec(byte_tokenizer().encode()), Sampling(max_tokens=99, stop=("d. A",))
    tokens = list(b"the end. A")
    if codec.is_done(tokens[:-1], sampling) or not codec.is_done(tokens, sampling):
        return "a stop string across tokens does not end an answer"
    return (
        "" if codec.answer(tokens, sampling)[0] == "the en" else "a stop string is part of the text"
    )


def _imported(folder: Path):
    """A small random model of transformers, and the URI of its import."""
    from raymega.convert.huggingface.importer import hf_import
    from raymega.prepare.tokenizer.trained import byte_tokenizer
    from tests.support.references import hf_models

    model = hf_models.make_model("gpt2")
    model.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    hf_import(
        folder / "theirs",
        str(folder / "ours"),
        created="2025-01-01T00:00:00+00:00",
        make_vocab_size_divisible_by=8,
    )
    return model, str(folder / "ours")


def _recomputed(ready, uri: str):
    """The answers of one rank of a world of its own."""
    import torch

    from raymega.checkpoint.tools.inspection import open_checkpoint
    from raymega.evaluate.run import EvalOptions, plan_of
    from raymega.generate.worker import continue_prompts
    from raymega.parallel.comm import world
    from raymega.parallel.comm.process_groups import groups_of_plan
    from raymega.train.build_scorer import build_scorer, load_weights

    plan = plan_of(open_checkpoint(uri), EvalOptions(seq_len=LENGTH))
    device = torch.device("cpu")
    address, store = world.host_store("127.0.0.1")
    world.open_world(
        rank=0, world_size=1, rendezvous=address, store=store, timeout_s=60.0, device=device
    )
    try:
        groups = groups_of_plan(plan, 0, timeout_s=60.0)
        scorer = build_scorer(plan, rank=0, groups=groups, device=device)
        load_weights(scorer, open_checkpoint(uri), groups)
        return continue_prompts(plan, scorer, groups, ready.task, device=device)
    finally:
        world.close_world()
