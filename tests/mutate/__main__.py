"""`make mutate`: draw mistakes, plant each in a copy of the repository, run its tests, and list survivors.

Its tests are those that run the function in which it lies, cheapest first. A mistake that no test sees is a survivor:
it shows a missing test, or it changes nothing. The list of what was tried (``.mutate/SEED.jsonl``) is appended to as each
ends, and read first: the same command continues where it ended, and ``SHARD=2/5`` tries every fifth mistake from the
second on. A file that has changed since is drawn from anew, and a survivor is tried again once another test runs its function.
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
from tests.mutate.ran import Ran, portions, recorded
from tests.mutations.tree import ROOT, Tree

PACKAGE = ROOT / "raymega"
FOLDERS = ("model", "parallel", "optim", "train", "data", "schedule", "checkpoint")
EQUIVALENT: dict[str, set[str]] = {}
"""Mistakes that change nothing, by file: the statement before and after."""
for entry in yaml.safe_load(Path(__file__).with_name("equivalent.yaml").read_text()):
    EQUIVALENT.setdefault(entry["file"], set()).add(entry["change"])
HEALTHY: dict[str, bool] = {}
"""Whether a test passes in the copy without a mistake, by its function."""
TIMEOUT_S = 900.0
"""Longest time of a portion of tests: a mistake that hangs is seen."""
OPTIONS = ("--sample-seed=0", "--timeout=100")
"""Options of pytest: the same cases for each mistake, and a test that hangs is seen after 100 s."""
SLOW = "Timeout (>"
"""Words of a test that hangs, or of a busy machine."""


def draw(num: int, seed: int) -> list[dict]:
    """Draw mistakes: an operator first, then a file that it can change, then a place, none twice.

    Of those in EQUIVALENT none is drawn, and another one takes its place; so it is for a change that another operator
    has made already. A mistake's turn counts these too: what is called equivalent later moves no mistake to another shard.
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
            "turn": len(drawn) + len(passed_over),
        }  # fmt: skip
    return list(drawn.values())


def attempt(tree: Tree, mistake: dict, ran: Ran) -> dict:
    """Plant one mistake, run the tests that run its function until one fails, and return what they said."""
    source = (PACKAGE / mistake["file"]).read_text()
    changed, _ = plant(source, mistake["operator"], mistake["number"])
    tests, began, num = ran.of(mistake["file"], mistake["line"]), time.monotonic(), 0
    verdict, said = "passed", ""
    with tree.planted(mistake["file"], changed):
        for some in portions(tests):
            verdict, said = tree.verdict(some, *OPTIONS, timeout_s=TIMEOUT_S)
            num += len(some)
            # a limit that was reached may be this machine's
            if SLOW in said:
                verdict, said = tree.verdict(_failed(said), *OPTIONS, timeout_s=TIMEOUT_S)
            if verdict != "passed":
                break
    seconds = round(time.monotonic() - began, 1)
    if verdict in ("failed", "not run") and not _is_sound(tree, said, ran):
        verdict = "unsound"
    seen = {"passed": "survived", "failed": "killed", "not run": "killed", "late": "killed"}
    return {
        **mistake, "verdict": seen.get(verdict, verdict), "tests": num, "of": len(tests),
        "seconds": seconds, "said": said[-300:],
    }  # fmt: skip


def _is_sound(tree: Tree, said: str, ran: Ran) -> bool:
    """Return whether the test that failed passes where nothing is planted; each function is asked once."""
    for name in _failed(said):
        function = name.partition("[")[0]
        if function not in HEALTHY:
            known = ran.tests.get(function)
            HEALTHY[function] = (known is not None and known.is_healthy) or (
                tree.verdict([name], *OPTIONS, timeout_s=TIMEOUT_S)[0] == "passed"
            )
        return HEALTHY[function]
    return True


def _failed(said: str) -> list[str]:
    """Return the id of the test that failed, if pytest names one."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)[:1]


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
    mistakes = [each for each in draw(options.num, options.seed) if each["turn"] % of == first - 1]
    if options.list:
        for each in mistakes:
            print(f"{each['file']}:{each['line']}: {each['operator']}: {each['change']}")
        return
    results = _results(ROOT / ".mutate" / f"{options.seed}.jsonl", mistakes)
    _report([each for each in results if each["key"] in {mistake["key"] for mistake in mistakes}])


def _results(path: Path, mistakes: list[dict]) -> list[dict]:
    """Return results of earlier runs, and those of the mistakes that had none or that other tests may see now."""
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {each["key"]: each for each in map(json.loads, lines)}
    ran = recorded(path.with_name("ran.jsonl"), OPTIONS)

    def is_settled(mistake: dict) -> bool:
        told = done.get(mistake["key"], {"verdict": "survived", "of": -1})
        return told["verdict"] != "survived" or told["of"] == len(
            ran.of(mistake["file"], mistake["line"])
        )

    with tempfile.TemporaryDirectory(prefix="raymega-mutate-") as folder, path.open("a") as file:
        tree = Tree(Path(folder))
        for mistake in (each for each in mistakes if not is_settled(each)):
            done[mistake["key"]] = told = attempt(tree, mistake, ran)
            file.write(json.dumps(told) + "\n")
            file.flush()
            print(
                f"{told['verdict']} {told['file']}:{told['line']} {told['change']} {told['seconds']} s",
                flush=True,
            )
    return list(done.values())


def _report(results: list[dict]) -> None:
    survivors = [each for each in results if each["verdict"] == "survived"]
    killed = sum(each["verdict"] == "killed" for each in results)
    print(f"\n{killed} of {len(results)} mistakes were seen; survivors:")
    for each in survivors:
        print(f"{each['file']}:{each['line']} ({each['operator']}): {each['change']}")


if __name__ == "__main__":
    main()
