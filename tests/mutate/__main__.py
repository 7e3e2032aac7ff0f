"""`make mutate`: draw mistakes, plant each in a copy of the repository, run the nearest tests, and list survivors.

A mistake that no test sees is a survivor: it shows a missing test, or it changes nothing. The list of what was tried
(``.mutate/SEED.jsonl``) is appended to as each ends, and read first: the same command continues where it ended, and
``SHARD=2/5`` tries every fifth mistake from the second on. A file that has changed since is drawn from anew.
Survivors that change nothing stand in ``equivalent.yaml`` with the reason, and are not drawn again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path
from zlib import crc32

import yaml

from tests.mutate.nearest import nearest_tests
from tests.mutate.operators import OPERATORS, places, plant
from tests.mutations.tree import ROOT, Tree

PACKAGE = ROOT / "raymega"
FOLDERS = ("model", "parallel", "optim", "train", "data", "schedule", "checkpoint")
EQUIVALENT: dict[str, set[str]] = {}
"""Mistakes that change nothing, by file: the statement before and after."""
for entry in yaml.safe_load(Path(__file__).with_name("equivalent.yaml").read_text()):
    EQUIVALENT.setdefault(entry["file"], set()).add(entry["change"])
HEALTHY: dict[str, bool] = {}
"""Whether a test passes in the copy without a mistake, by its file or its function."""
NEAREST = 2
"""How many test files are run first: most mistakes are seen by these, and the others are not even loaded."""
TIMEOUT_S = 900.0
"""Longest time of a mistake's tests: one that hangs is seen."""
OPTIONS = ("--sample-seed=0", "--timeout=200")
"""Options of pytest: the same cases for each mistake, and a test that hangs is seen after 200 s."""


def draw(num: int, seed: int) -> list[dict]:
    """Draw mistakes: an operator first, then a file that it can change, then a place, none twice.

    Of those in EQUIVALENT none is drawn, and another one takes its place; so it is for a change that another operator
    has made already.
    """
    found: dict[str, dict[str, list[tuple[int, int]]]] = {name: {} for name in OPERATORS}
    for path in sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        if not nearest_tests(file):
            continue
        for operator, number, line in places(path.read_text()):
            found[operator].setdefault(file, []).append((number, line))
    source, drawn, changes, passed_over = random.Random(seed), {}, set(), set()
    total = sum(len(some) for files in found.values() for some in files.values())
    while len(drawn) < min(num, total - len(passed_over)):
        operator = source.choice(list(OPERATORS))
        file = source.choice(sorted(found[operator]))
        number, line = source.choice(found[operator][file])
        place = (operator, file, number)
        if place in drawn or place in passed_over:
            continue
        changed, text = plant((PACKAGE / file).read_text(), operator, number)
        # what a file has become, so that results are of this very file
        key = f"{operator}/{file}/{crc32(changed.encode()):08x}"
        if text in EQUIVALENT.get(file, ()) or (file, changed) in changes:
            passed_over.add(place)
            continue
        changes.add((file, changed))
        drawn[place] = {
            "key": key, "operator": operator, "file": file, "number": number, "line": line, "change": text,
        }  # fmt: skip
    return list(drawn.values())


def attempt(tree: Tree, mistake: dict) -> dict:
    """Plant one mistake, run the tests nearest to its file until one fails, and return what they said."""
    source = (PACKAGE / mistake["file"]).read_text()
    changed, _ = plant(source, mistake["operator"], mistake["number"])
    tests, began = nearest_tests(mistake["file"]), time.monotonic()
    verdict, said = "passed", ""
    with tree.planted(mistake["file"], changed):
        for some in (tests[:NEAREST], tests[NEAREST:]):
            if some and verdict == "passed":
                verdict, said = tree.verdict(some, *OPTIONS, timeout_s=TIMEOUT_S)
            if verdict == "passed":
                HEALTHY.update(dict.fromkeys(some, True))
    seconds = round(time.monotonic() - began, 1)
    if verdict in ("failed", "not run") and not _is_sound(tree, said):
        verdict = "unsound"
    seen = {"passed": "survived", "failed": "killed", "not run": "killed", "late": "killed"}
    verdict = seen.get(verdict, verdict)
    return {
        **mistake,
        "verdict": verdict,
        "tests": list(tests),
        "seconds": seconds,
        "said": said[-300:],
    }


def _is_sound(tree: Tree, said: str) -> bool:
    """Return whether the test that failed passes where nothing is planted; each function is asked once."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if not found:
        return True
    function, file = found[1].partition("[")[0], found[1].partition("::")[0]
    # a file that passed with a mistake planted passes without
    if file not in HEALTHY and function not in HEALTHY:
        HEALTHY[function] = tree.verdict([found[1]], *OPTIONS, timeout_s=TIMEOUT_S)[0] == "passed"
    return HEALTHY.get(file) or HEALTHY[function]


def main() -> None:
    """Try the mistakes of a seed that are not in its list yet, and print the survivors of the whole list."""
    parser = argparse.ArgumentParser(prog="make mutate")
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1", help="K/N: every N-th mistake from the K-th on")
    parser.add_argument(
        "--list", action="store_true", help="print what would be tried, and try nothing"
    )
    options = parser.parse_args()
    first, of = map(int, options.shard.split("/"))
    mistakes = draw(options.num, options.seed)[first - 1 :: of]
    if options.list:
        for each in mistakes:
            print(f"{each['file']}:{each['line']}: {each['operator']}: {each['change']}")
        return
    results = _results(ROOT / ".mutate" / f"{options.seed}.jsonl", mistakes)
    _report([each for each in results if each["key"] in {mistake["key"] for mistake in mistakes}])


def _results(path: Path, mistakes: list[dict]) -> list[dict]:
    """Return results of earlier runs, and those of the mistakes that had none."""
    path.parent.mkdir(exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tried = {each["key"] for each in done}
    # files of a survivor's tests have passed
    for each in done:
        if each["verdict"] == "survived":
            HEALTHY.update(dict.fromkeys(each["tests"], True))
    with tempfile.TemporaryDirectory(prefix="raymega-mutate-") as folder, path.open("a") as file:
        tree = Tree(Path(folder))
        for mistake in (each for each in mistakes if each["key"] not in tried):
            done.append(attempt(tree, mistake))
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()
            told = done[-1]
            print(
                f"{told['verdict']} {told['file']}:{told['line']} {told['change']} {told['seconds']} s",
                flush=True,
            )
    return done


def _report(results: list[dict]) -> None:
    survivors = [each for each in results if each["verdict"] == "survived"]
    killed = sum(each["verdict"] == "killed" for each in results)
    print(f"\n{killed} of {len(results)} mistakes were seen; survivors:")
    for each in survivors:
        print(f"{each['file']}:{each['line']} ({each['operator']}): {each['change']}")


if __name__ == "__main__":
    main()
