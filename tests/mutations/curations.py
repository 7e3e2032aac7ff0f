"""Planted mistakes in the curation of text, and what the corpus then is not.

`tests.mutations.outcomes` calls `outcome` with each of them planted. What is expected is computed from
the texts, by sets of words, without the package.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

from tests.mutations.saves import SaveMutation as CurationMutation

NEAR, EXACT = "curate/duplicates/near.py", "curate/duplicates/exact.py"
SETS, SPOOL = "curate/duplicates/shingle_sets.py", "curate/spool.py"
TASKS, CUT = "curate/tasks.py", "curate/steps/decontaminate.py"
CURATION_MUTATIONS = (
    CurationMutation(
        name="pairs of bands are not verified",
        file=NEAR,
        old='verified = pairs[pairs["score"] >= options.threshold]',
        new="verified = pairs",
        caught="near: removed without a similar document",
    ),
    CurationMutation(
        name="the threshold is reversed",
        file=NEAR,
        old='pairs["score"] >= options.threshold',
        new='pairs["score"] <= options.threshold',
        caught="near: removed without a similar document",
    ),
    CurationMutation(
        name="the similarity is the share of the larger set",
        file=SETS,
        old="common / (first.size + second.size - common)",
        new="common / max(first.size, second.size)",
        caught="near: removed without a similar document",
    ),
    CurationMutation(
        name="the largest id is kept",
        file=NEAR,
        old="= rows[name][last], rows[name][other]",
        new="= rows[name][other], rows[name][last]",
        caught="near: a larger id was kept",
    ),
    CurationMutation(
        name="a document is removed for one that is not kept",
        file=NEAR,
        old=" or (other_high, other_low) in removed",
        new="",
        caught="near: removed without a similar document",
    ),
    CurationMutation(
        name="neighbours in a bucket are off by one",
        file=NEAR,
        old="range(1, min(int(rank.max(initial=0)), NEIGHBOURS) + 1)",
        new="range(2, min(int(rank.max(initial=0)), NEIGHBOURS) + 1)",
        caught="near: missed",
    ),
    CurationMutation(
        name="bands share no parts between groups",
        file=NEAR,
        old='part_of(rows["band"], self._num_parts)',
        new='part_of(rows["low"], self._num_parts)',
        caught="near: missed",
    ),
    CurationMutation(
        name="a run of letters is a word in scripts without spaces",
        file="curate/tokens.py",
        old="part[part == LETTER] = ALONE",
        new="pass",
        caught="near: missed",
    ),
    CurationMutation(
        name="two copies are kept",
        file=EXACT,
        old="rank >= copies",
        new="rank > copies",
        caught="exact: other texts",
    ),
    CurationMutation(
        name="any copy is kept",
        file=EXACT,
        old='"key", "key2", "high", "low", "line"',
        new='"key", "key2", "row", "line"',
        caught="exact: other ids",
    ),
    CurationMutation(
        name="the document behind a copy is removed",
        file=TASKS,
        old="in enumerate(documents):",
        new="in enumerate(documents, 1):",
        caught="exact: other texts",
    ),
    CurationMutation(
        name="the line behind a copy is removed",
        file=EXACT,
        old="if number == first:",
        new="if number == first + 1:",
        caught="lines: other texts",
    ),
    CurationMutation(
        name="portions of two sets are compared up to the larger end",
        file=SETS,
        old="last = min(first[-1], second[-1])",
        new="last = max(first[-1], second[-1])",
        caught="near: missed",
    ),
    CurationMutation(
        name="a range of hashes has those of all behind it",
        file=SETS,
        old="block[places[number] : places[number + 1]]",
        new="block[places[number] :]",
        caught="near: sets are not compared",
    ),
    CurationMutation(
        name="the shingles of the last portion alone have minima",
        file=NEAR,
        old="np.minimum(smallest, signature(portion, self._options), out=smallest)",
        new="smallest[:] = signature(portion, self._options)",
        caught="near: portions decide",
    ),
    CurationMutation(
        name="blocks of a table have the rows of the first",
        file=SPOOL,
        old="borders.astype(np.int64) + self._count",
        new="borders.astype(np.int64)",
        caught="exact: other texts",
    ),
    CurationMutation(
        name="a hit ends with its first word",
        file=CUT,
        old="tokens.ends[hits + num_words - 1]",
        new="tokens.ends[hits]",
        caught="decontaminate: other text",
    ),
    CurationMutation(
        name="what stands before a hit is left",
        file=CUT,
        old="max(first - window, 0)",
        new="max(first, 0)",
        caught="decontaminate: other text",
    ),
    CurationMutation(
        name="a task has runs of fewer words than the text",
        file=CUT,
        old="shingles(hashes, num_words))",
        new="shingles(hashes, num_words - 1))",
        caught="decontaminate: other text",
    ),
    CurationMutation(
        name="runs across blocks are lost",
        file="curate/tokens.py",
        old="tokens.since(max(len(tokens.hashes) - kept, 0))",
        new="tokens.since(len(tokens.hashes))",
        caught="decontaminate: other text",
    ),
    CurationMutation(
        name="runs of the block before are found again",
        file=CUT,
        old="block.since(max(num_old - num_words + 1, 0))",
        new="block",
        caught="decontaminate: a hit twice",
    ),
    CurationMutation(
        name="white space is not normalised before the language is asked for",
        file="curate/steps/language.py",
        old='" ".join(text[: self._options.characters].split())',
        new='text[: self._options.characters].replace("\\n", " ")',
        caught="language: ru",
    ),
    CurationMutation(
        name="the draw is reversed",
        file="curate/steps/quality_model.py",
        old="draw > 1 - score",
        new="draw > score",
        caught="draw: bad documents are kept",
    ),
)


def outcome(folder: Path) -> str:
    """Return ``sound``, or the first step with which something is wrong."""
    from raymega.curate import pipeline, state
    from raymega.curate.duplicates import exact, near, shingle_sets
    from raymega.prepare import groups
    from tests.unit.curate import corpora

    for module, name, value in corpora.in_this_process():
        setattr(module, name, value)
    groups.MIN_GROUP_BYTES, pipeline.COMPARED_BYTES = 1 << 13, 1 << 15
    # Sets and tables are made and read in portions, as those of large documents are.
    near.PORTION_NUMBERS = state.PORTION_NUMBERS = 50
    shingle_sets.PORTION_CHARACTERS, exact.PACKED_ROWS = 300, 8
    checks = (_exact, _near, _lines, _decontaminated, _language, _draw)
    return next(filter(None, (check(folder) for check in checks)), "sound")


def _exact(folder: Path) -> str:
    texts = [f"text number {number % 30}" for number in range(900)]
    every, left = _ids(folder, "exact", texts, ["exact"])
    if Counter(left.values()) != dict.fromkeys(texts, 1):
        return "exact: other texts"
    smallest = {text: min(name for name in every if every[name] == text) for text in set(texts)}
    return "" if set(left) == set(smallest.values()) else "exact: other ids"


def _near(folder: Path) -> str:
    from raymega.curate.duplicates import shingle_sets
    from raymega.errors import InternalError

    draw, texts = random.Random(7), list[str]()
    for number in range(30):
        letters = "\u3042\u3044\u3046\u3048\u304a\u304b\u304d\u304f" if number % 3 == 0 else ""
        words = [
            letters[draw.randrange(8)] if letters else f"w{draw.randrange(500)}" for _ in range(160)
        ]
        for share in (0, 0.005, 0.03, 0.06):
            words = [draw.choice(words) if draw.random() < share else word for word in words]
            texts.append(("" if letters else " ").join(words))
    texts = list(dict.fromkeys(texts))
    try:
        every, left = _ids(folder, "near", texts, ["near"])
    except InternalError:
        return "near: sets are not compared"
    sets = {name: _runs(text) for name, text in every.items()}
    similar = {
        (a, b): len(sets[a] & sets[b]) / len(sets[a] | sets[b])
        for a, b in combinations(sorted(every), 2)
    }
    near = {pair: value for pair, value in similar.items() if value >= 0.8}
    for name in set(every) - set(left):
        partners = [
            other
            for pair in near
            if name in pair
            for other in pair
            if other != name and other in left
        ]
        if not partners:
            return "near: removed without a similar document"
        if min(partners) > name:
            return "near: a larger id was kept"
    missed = [value for pair, value in near.items() if set(pair) <= set(left)]
    if any(value >= 0.9 for value in missed) or len(missed) > len(near) / 10:
        return "near: missed"
    # Minima of a part of a set find nearly as many pairs, but other ones.
    one_band, kept = [{"near": {"bands": 1, "rows": 16}}], []
    for characters in (shingle_sets.PORTION_CHARACTERS, 1 << 22):
        shingle_sets.PORTION_CHARACTERS = characters
        kept.append(set(_ids(folder, f"near-{characters}", texts, one_band)[1].values()))
    return "" if kept[0] == kept[1] else "near: portions decide"


def _lines(folder: Path) -> str:
    texts = [
        f"The line that stands only here is {number}.\nThe line that stands in all of them."
        for number in range(400)
    ]
    every, left = _ids(folder, "lines", texts, ["lines"])
    first = min(every)
    expected = {
        name: text if name == first else text.partition("\n")[0] for name, text in every.items()
    }
    return "" if left == expected else "lines: other texts"


def _decontaminated(_: Path) -> str:
    from raymega.curate import tokens
    from raymega.curate.document import CuratedDocument
    from raymega.curate.options import Decontaminate
    from raymega.curate.steps.decontaminate import DecontaminateStep, hash_tasks

    # The hit lies in several blocks of the text.
    tokens.BLOCK_CHARACTERS = 20
    filler = " ".join(f"word{number}" for number in range(300))
    task = " ".join(f"task{number}" for number in range(13))
    step = DecontaminateStep(Decontaminate(tasks=("x",)), hash_tasks([task], 13))
    document = CuratedDocument(id="0" * 32, text=f"{filler} {task} {filler}", source="")
    step.apply(document)
    expected = f"{filler[:-199].strip()}\n\n{filler[199:].strip()}"
    if document.text != expected:
        return "decontaminate: other text"
    # A shorter task, of which the block behind it has the words too.
    short = " ".join(f"short{number}" for number in range(8))
    step = DecontaminateStep(Decontaminate(tasks=("x",)), hash_tasks([task, short], 13))
    document = CuratedDocument(id="0" * 32, text=f"{filler} {short} {filler}", source="")
    step.apply(document)
    is_once = document.reasons == ["decontaminate: 1 runs of words"]
    return "" if is_once else "decontaminate: a hit twice"


def _language(_: Path) -> str:
    from raymega.curate.options import Language
    from raymega.curate.steps.language import LanguageStep

    step = LanguageStep(Language(engine="fasttext"))
    text = "Chapter\u00a01.\u00a0The\u00a0Debian\u00a0Project"
    code = step.classify(text)[0]
    return "" if code == "en" else f"language: {code}"


def _draw(_: Path) -> str:
    import numpy as np

    from raymega.curate.document import CuratedDocument
    from raymega.curate.options import QualityModel
    from raymega.curate.steps.quality_model import LinearModel, QualityModelStep

    model = LinearModel(weights=np.zeros(1 << 18, dtype=np.float32), bias=-9.0)
    step = QualityModelStep(QualityModel(model="x"), model.encode())
    documents = (
        CuratedDocument(id=f"{number:032x}", text="text", source="") for number in range(200)
    )
    kept = sum(not step.apply(document).is_removed for document in documents)
    return "draw: bad documents are kept" if kept > 20 else ""


def _ids(
    folder: Path, name: str, texts: list[str], steps: list
) -> tuple[dict[str, str], dict[str, str]]:
    """Curate, and return the texts by id before and after the steps."""
    from tests.unit.curate.corpora import curated, documents, write_corpus

    write_corpus(folder / name, texts)
    found = []
    for number, each in enumerate((["sample"], steps)):
        done = curated(folder / name, folder / f"{name}-{number}", each)
        found.append({document.id: document.text for document in documents(done)})
    return found[0], found[1]


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+|[\u3040-\u30ff]", text)
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}
