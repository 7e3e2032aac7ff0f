"""SmolLM2 in lm-eval: raymega's model on the checkpoint against lm-eval's own Hugging Face model on the exported folder.

Both read the same local YAML tasks: the last word of a passage, and which of four words ends a sentence. Both are in float32,
on all documents. On a few both are in float64 too, and each side's float32 is measured against it, which shows whose rounding
it is: torch adds up the 49,152 exponentials of a softmax in float32, unless lm-eval's `softmax_dtype` says otherwise.
RAYMEGA_TEST_SETS=FOLDER takes 200 passages and questions of LAMBADA's test file; else pages of this repository give 8.
"""

import json

import numpy as np
import pytest

from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.evaluate.run import EvalOptions, prepare_evaluation
from tests.dist.runs.test_lm_eval import CHOICES, LAMBADA, NOW, scored_by_ranks
from tests.support import smollm2

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = [
    pytest.mark.dist, pytest.mark.wide, pytest.mark.real_model, pytest.mark.timeout(7200),
]  # fmt: skip
LIMIT = 1e-4
SEQ_LEN = 512
NUM_FEW = 8
"""Documents of the comparison in float64, which takes a second a passage on one core."""
NUM_CONTEXT = 12
"""Number of words before the one that a question asks for."""
__all__ = ["scored_by_ranks"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The checkpoint, its export, and the tasks with their documents."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write_model(folder / "hf")
    uri, number = str(folder / "native"), 200 if smollm2.has_test_sets() else 8
    hf_import(folder / "hf", uri, created=NOW)
    hf_export(uri, folder / "exported")
    passages = [
        json.loads(line)["text"] for line in smollm2.text_files(folder)[1].read_text().splitlines()
    ]
    documents = questions([each for each in passages if " " in each.strip()][:number])
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    files = f"dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}\n"
    for name, text in {"words": LAMBADA, "choices": CHOICES}.items():
        (folder / f"{name}.yaml").write_text(text + files)
    return folder


def questions(passages):
    """Each passage with its last words as a question: the right last word, and those of three other passages."""
    lasts = [text.split(" ")[-1] for text in passages]
    for number, text in enumerate(passages):
        later = [word for word in lasts[number + 1 :] + lasts[:number] if word != lasts[number]]
        endings = [f" {word}" for word in list(dict.fromkeys(later))[:3]]
        endings.insert(number % 4, f" {lasts[number]}")
        before = " ".join(text.split(" ")[-1 - NUM_CONTEXT : -1])
        yield {"text": text, "before": before, "endings": endings, "right": number % 4}


def theirs(folder, dtype, *, limit=None, **options):
    """Log-likelihoods and accuracy of both tasks by lm-eval alone, of the first ``limit`` documents or all."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(
        pretrained=str(folder / "exported"), dtype=dtype, device="cpu", batch_size=8,
        max_length=SEQ_LEN, **options,
    )  # fmt: skip
    found = {}
    for file in ("words", "choices"):
        done = simple_evaluate(
            model=model, tasks=[str(folder / f"{file}.yaml")], bootstrap_iters=0, limit=limit,
            task_manager=TaskManager(include_defaults=False),
        )  # fmt: skip
        ((name, values),) = done["results"].items()
        found[file] = log_likelihoods(done["samples"][name]), values["acc,none"]
    return found


def ours(folder, dtype, *, limit=0):
    """The same by raymega's model on the checkpoint."""
    found = {}
    options = EvalOptions(overrides=(f"precision.dtype={dtype}",), seq_len=SEQ_LEN, limit=limit)
    for file in ("words", "choices"):
        ready = prepare_evaluation(
            str(folder / "native"), str(folder / f"{file}.yaml"), None, options
        )
        report = ready.run(lambda *_: None)
        found[file] = log_likelihoods(report.samples), report.metrics["acc"]
    return found


def log_likelihoods(samples):
    rows = sorted(samples, key=lambda sample: sample["doc_id"])
    return np.array(
        [
            [log_prob for log_prob, _ in np.reshape(each["filtered_resps"], (-1, 2))]
            for each in rows
        ],
        dtype=float,
    )


def test_log_likelihoods_and_accuracy_are_those_of_the_hugging_face_model(model, scored_by_ranks):
    ranks, wanted = ours(model, "float32"), theirs(model, "float32")
    for file, (found, right) in ranks.items():
        apart, accuracy = largest(found, wanted[file][0]), wanted[file][1]
        facts = {"task": file, "documents": len(found), "accuracy": [right, accuracy]}
        print(json.dumps(facts | {"float32": apart}), flush=True)
    for file, (found, right) in ranks.items():
        assert largest(found, wanted[file][0]) < LIMIT and right == wanted[file][1], file


def test_in_float64_the_few_agree_and_show_whose_rounding_float32_has(model, scored_by_ranks):
    truth, mine = theirs(model, "float64", limit=NUM_FEW), ours(model, "float64", limit=NUM_FEW)
    narrow = {
        "raymega": ours(model, "float32", limit=NUM_FEW),
        "lm-eval": theirs(model, "float32", limit=NUM_FEW),
        "lm-eval, softmax in float64": theirs(
            model, "float32", limit=NUM_FEW, softmax_dtype="float64"
        ),
    }
    for file, (wanted, accuracy) in truth.items():
        found, right = mine[file]
        rounding = {name: largest(each[file][0], wanted) for name, each in narrow.items()}
        facts = {"task": file, "float64": largest(found, wanted), "float32 and float64": rounding}
        print(json.dumps(facts), flush=True)
        assert largest(found, wanted) < LIMIT and right == accuracy


def largest(found, wanted):
    """The largest difference of two tables of log-likelihoods."""
    return float(np.abs(found - wanted).max())
