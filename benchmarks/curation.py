"""Measures `raymega data curate` on the Debian project's books in 25 languages, a JSON line for each part.

    apt-get download debian-handbook debian-history debian-policy{,-ja} \\
      debian-reference-{de,en,es,fr,id,it,ja,pt,pt-br,zh-cn,zh-tw} debian-faq{,-de,-fr,-it,-ja,-ko,-nl,-pt,-ru,-zh-cn} \\
      developers-reference{,-de,-fr,-it,-ja,-ru} maint-guide{,-ca,-de,-es,-fr,-it,-ja,-ru,-vi,-zh-cn,-zh-tw}
    for each in *.deb; do dpkg-deb -x $each root; done
    python -m benchmarks.curation root/usr/share --tasks lambada_test.jsonl --tasks wikitext_test.txt

The steps run in this process, without Ray: seconds are CPU seconds of one core, reading included.
The part `quality` needs the packages datatrove and spacy, which are asked about the same documents: those below
`--english`, or the English pages. The part `memory` curates one document of `--large-mb`, each step in a process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from html import escape
from pathlib import Path
from time import process_time

import numpy as np

from raymega.curate import pipeline
from raymega.curate.assets import read_tasks
from raymega.curate.checks import CurateOptions
from raymega.curate.document import CuratedDocument, read_curated
from raymega.curate.duplicates.shingle_sets import jaccard, shingle_set
from raymega.curate.options import Decontaminate, Language, Near, Quality
from raymega.curate.steps.decontaminate import DecontaminateStep, task_texts
from raymega.curate.steps.language import LanguageStep
from raymega.curate.steps.quality import QualityStep
from raymega.curate.steps.quality_model import FEATURE_BITS, LinearModel
from raymega.prepare.readers.web import _main_text

SEED = 1
LEAST_CHARACTERS = 500
NEAR = Near()
LANGUAGE_ROUNDS = 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("books", type=Path)
    parser.add_argument("--tasks", type=Path, action="append", default=[])
    parser.add_argument("--parts", nargs="*", default=sorted(PARTS))
    parser.add_argument("--english", type=Path)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--large-mb", type=int, default=200)
    parser.add_argument("--steps", nargs="*", default=[], help="steps of the part memory; else all")
    parser.add_argument("--alone", type=json.loads, help="a step to measure on the file BOOKS")
    options = parser.parse_args()
    pipeline.on_cluster = lambda items, run: map(run, items)
    pipeline.session_at = lambda _: nullcontext()
    if options.alone:
        print(json.dumps(alone(options.books, options.alone)))
        return
    pages = [path for path in sorted(options.books.rglob("*.html")) if path.is_file()]
    texts = {str(path): _main_text(path.read_bytes()) for path in pages if not path.is_symlink()}
    for part in options.parts:
        print(json.dumps({"part": part} | PARTS[part](texts, options)), flush=True)


def curated(texts, steps):
    """Curate texts by name; return the documents that are left by name, the counts and the CPU seconds."""
    with tempfile.TemporaryDirectory() as place:
        corpus, recipe = Path(place, "corpus.jsonl"), Path(place, "recipe.yaml")
        lines = [json.dumps({"text": text}) for text in texts.values()]
        corpus.write_text("\n".join(lines) + "\n")
        recipe.write_text(json.dumps({"steps": steps}))
        options = CurateOptions(inputs=(str(corpus),), out=f"{place}/out", recipe=str(recipe))
        started = process_time()
        done = pipeline.curate(options, on_progress=lambda *_: None)
        seconds = process_time() - started
        left = [
            each for name in done.files for each in read_curated(Path(done.uri, name).read_bytes())
        ]
        # A document's source ends with the byte of its line.
        places, at = {}, 0
        for name, line in zip(texts, lines, strict=True):
            places[str(at)] = name
            at += len(line) + 1
        kept = {places[each.source.rpartition("@")[2]]: each.text for each in left}
        return kept, done.counts, seconds


def exact(texts, _):
    """The copies that are removed, and those that SHA-256 finds."""
    texts = {name: text for name, text in texts.items() if text}
    kept, _, seconds = curated(texts, ["exact"])
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    unique = set(digests.values())
    return {
        "documents": len(texts), "text_mb": _megabytes(texts), "removed": len(texts) - len(kept),
        "expected": len(texts) - len(unique), "kept_all_texts": {digests[name] for name in kept} == unique,
        "cpu_s": round(seconds, 2),
    }  # fmt: skip


def near(texts, _):
    """Edited copies that are removed, by true similarity, and the least similarity of a removal."""
    draw = random.Random(SEED)
    unique = {text: name for name, text in texts.items() if len(text) >= LEAST_CHARACTERS}
    chosen = draw.sample(sorted(unique, key=unique.__getitem__), 600)
    asked, truth = {}, {}
    for number, text in enumerate(chosen):
        asked[f"{number}"] = text
        edited = _edited(text, draw.uniform(0.0, 0.06), draw)
        asked[f"{number} edited"] = edited
        truth[number] = jaccard(shingle_set(text, NEAR), shingle_set(edited, NEAR))
    kept, counts, _ = curated(asked, ["near"])
    found = {}
    for name, low, high in (("0.9", 0.9, 1.1), ("0.8", 0.8, 0.9), ("below 0.75", 0, 0.75)):
        pairs = [number for number, value in truth.items() if low <= value < high]
        gone = [number for number in pairs if not {f"{number}", f"{number} edited"} <= set(kept)]
        eastern = [
            number for number in pairs if re.search("[\u3040-\u30ff\u4e00-\u9fff]", chosen[number])
        ]
        found[name] = {"pairs": len(pairs), "one_removed": len(gone), "japanese_or_chinese": len(eastern),
                       "of_these_removed": len(set(gone) & set(eastern))}  # fmt: skip
    # Every removal, against all that is kept.
    sets = {name: shingle_set(text, NEAR) for name, text in asked.items()}
    removed = [name for name in asked if name not in kept]
    least = min(max(jaccard(sets[name], sets[other]) for other in kept) for name in removed)
    whole, _, seconds = curated(texts, ["exact", "near"])
    size = _megabytes(texts)
    return {
        "by_similarity": found, "removed": len(removed), "least_similarity_of_removal": round(least, 4),
        "whole_corpus_kept": len(whole), "whole_corpus_mb_per_cpu_s": round(size / seconds, 2),
        "examples": len(counts["steps"][-1]["examples"]),
    }  # fmt: skip


def language(texts, _):
    """Share of pages whose language is that of their path, and documents per CPU second."""
    labelled = [(found[1][:2], text) for name, text in texts.items() if len(text) >= LEAST_CHARACTERS
                and (found := re.search(r"\.([a-z]{2})(?:-[a-z]{2})?\.html$", name))]  # fmt: skip
    results = {"pages": len(labelled)}
    for engine, characters in (("cascade", 2000), ("fasttext", 500), ("fasttext", 300)):
        step = LanguageStep(Language(engine=engine, characters=characters))
        step.classify(labelled[0][1])
        seconds = []
        # The least of some rounds, as others use the machine.
        for _ in range(LANGUAGE_ROUNDS):
            started = process_time()
            right = sum(step.classify(text)[0] == label for label, text in labelled)
            seconds.append(process_time() - started)
        results[f"{engine}, {characters} characters"] = {"right": round(right / len(labelled), 4), "documents_per_cpu_s": round(len(labelled) / min(seconds))}  # fmt: skip
    return results


def decontaminate(texts, options):
    """Documents with a planted task text that are found, and clean ones that are taken."""
    if not options.tasks:
        return {"skipped": "no --tasks"}
    draw = random.Random(SEED)
    tasks = [text for path in options.tasks for text in task_texts(path.name, path.read_text())]
    tasks = [text for text in tasks if 15 <= len(text.split()) <= 300]
    settings = Decontaminate(tasks=tuple(map(str, options.tasks)))
    step = DecontaminateStep(settings, read_tasks(settings))
    names = [name for name, text in texts.items() if len(text) >= 1000]
    planted = set(draw.sample(names, max(len(names) // 100, 1)))
    found = {
        "planted": len(planted),
        "found": 0,
        "still_there": 0,
        "clean": len(names) - len(planted),
        "taken": 0,
    }
    started = process_time()
    for name in names:
        task = draw.choice(tasks) if name in planted else ""
        middle = len(texts[name]) // 2
        text = f"{texts[name][:middle]} {task} {texts[name][middle:]}" if task else texts[name]
        document = CuratedDocument(id="0" * 32, text=text, source=name)
        outcome = step.apply(document)
        if not task:
            found["taken"] += bool(outcome.reason)
        else:
            found["found"] += bool(outcome.reason)
            found["still_there"] += task in document.text and not outcome.is_removed
    return found | {"cpu_s": round(process_time() - started, 2)}


def quality(texts, options):
    """Share of equal decisions with datatrove, and how many times its speed."""
    try:
        from datatrove.data import Document
        from datatrove.pipeline import filters
    except ImportError as error:
        return {"skipped": str(error)}
    english = _english(options) if options.english else [
        text for name, text in texts.items() if text and ("en-US" in name or ".en.html" in name)
    ]  # fmt: skip
    # Halves too, so that more documents come close to a limit.
    english += [text[: len(text) // 2] for text in english] + [text[:600] for text in english]
    english = [text for text in english if text.strip()]
    theirs = {
        "gopher": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "c4": filters.C4QualityFilter(),
        "fineweb": filters.FineWebQualityFilter(char_duplicates_ratio=0.1),
    }
    results, their_s, our_s, equal = {"documents": len(english)}, 0.0, 0.0, 0
    for family, other in theirs.items():
        other.filter(Document(text="A first sentence. A second one.", id=""))
        started = process_time()
        removed = [other.filter(Document(text=text, id="")) is not True for text in english]
        between = process_time()
        step = QualityStep(Quality(rules=(family,)))
        asked = (CuratedDocument(id="", text=text, source="") for text in english)
        ours = [step.apply(document).is_removed for document in asked]
        their_s, our_s = their_s + between - started, our_s + process_time() - between
        same = sum(a == b for a, b in zip(removed, ours, strict=True))
        equal += same
        results[family] = {"equal": round(same / len(english), 4), "kept": len(english) - sum(ours)}
    return results | {
        "equal": round(equal / 4 / len(english), 4),
        "times_their_speed": round(their_s / our_s, 1),
    }


def memory(texts, options):
    """Peak memory and CPU seconds of each step for one document, every line of which is another."""
    found = {"document_mb": options.large_mb}
    with tempfile.TemporaryDirectory() as place:
        file, page, size, number = Path(place, "large.txt"), Path(place, "large.html"), 0, 0
        with file.open("wb") as stream, page.open("wb") as tagged:
            tagged.write(b"<html><body><main>\n")
            while size < options.large_mb * 1_000_000:
                for text in texts.values():
                    if size >= options.large_mb * 1_000_000:
                        break
                    lines = [f"{line} {number}" for line in text.split("\n")]
                    number += 1
                    size += stream.write("\n".join([*lines, ""]).encode())
                    tagged.write("".join(f"<p>{escape(line)}</p>\n" for line in lines).encode())
            tagged.write(b"</main></body></html>\n")
        model = Path(place, "model.npz")
        weights = np.zeros(1 << FEATURE_BITS, dtype=np.float32)
        model.write_bytes(LinearModel(weights=weights, bias=0.0).encode())
        tasks = {"decontaminate": {"tasks": list(map(str, options.tasks)), "max_pieces": 1 << 30}}
        steps = ["near", "lines", *(tasks for _ in options.tasks[:1]), "exact", "quality", "personal", "language",
                 {"quality_model": {"model": str(model)}}, "mend", "extract"]  # fmt: skip
        steps = [step for step in steps if not options.steps or _name(step) in options.steps]
        for step in steps:
            read = page if step == "extract" else file
            command = [
                sys.executable,
                "-m",
                "benchmarks.curation",
                str(read),
                "--alone",
                json.dumps(step),
            ]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[_name(step)] = json.loads(told)
            print(step, told, file=sys.stderr, flush=True)
    return found


def _name(step):
    return step if isinstance(step, str) else next(iter(step))


def alone(file, step):
    """Curate a file by one step; return this process's peak memory and CPU seconds."""
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place, "recipe.yaml")
        recipe.write_text(json.dumps({"steps": [step]}))
        options = CurateOptions(inputs=(str(file),), out=f"{place}/out", recipe=str(recipe))
        pipeline.curate(options, on_progress=lambda *_: None)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mib": peak_kib >> 10, "cpu_s": round(process_time(), 1)}


def _english(options):
    """Documents below a folder, drawn by a seed, of at most 20,000 characters."""
    files = [path for path in sorted(options.english.rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix in (".html", ".md", ".pod", ".txt")]
    drawn = random.Random(SEED).sample(files, min(options.documents, len(files)))
    texts = (
        _main_text(path.read_bytes()) if path.suffix == ".html" else path.read_text("utf-8", "replace")
        for path in drawn
    )  # fmt: skip
    return [text[:20_000] for text in texts if text.strip()]


def _edited(text, share, draw):
    """A text of which a share of the words, or in scripts without spaces of the characters, is another."""
    words = text.split(" ") if text.count(" ") > len(text) / 20 else list(text)
    for at in range(len(words)):
        if draw.random() < share:
            words[at] = draw.choice(words)
    return (" " if text.count(" ") > len(text) / 20 else "").join(words)


def _megabytes(texts):
    return round(sum(len(text.encode()) for text in texts.values()) / 1e6, 2)


PARTS = {
    "exact": exact,
    "near": near,
    "language": language,
    "decontaminate": decontaminate,
    "quality": quality,
    "memory": memory,
}

if __name__ == "__main__":
    main()
