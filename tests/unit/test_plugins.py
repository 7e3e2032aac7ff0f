"""Plug-ins of the package that docs/extending.md shows: what is checked before anything starts."""

import importlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from raymega import plugins
from raymega.api import load_job
from raymega.config.schema import ModelSection, OptimizerSection
from raymega.convert.huggingface.families.table import HF_FAMILIES
from raymega.convert.native import tuned_model_of
from raymega.data.row_rules.plugin_rows import transforms_of
from raymega.data.rows import whole_row
from raymega.data.samples import open_samples
from raymega.errors import CommunicationError, ConfigError
from raymega.model.families import make_norm
from raymega.model.layers.mlp import ACTIVATIONS, named_activation
from raymega.optim.lr_schedule import learning_rate
from raymega.optim.updates import ParamState, make_update_group, update_code
from raymega.orchestrate.run_store.run_identity import identity_faults, identity_of
from raymega.parallel.tensor_parallel.cross_entropy import LossTerms
from raymega.parallel.tensor_parallel.vocab_logits import VocabLogits
from raymega.plan.layers.family_parts import FAMILY_PARTS, parts_of
from raymega.plan.layers.norm_kinds import NORM_KINDS
from raymega.plan.memory.optimizer_state import KINDS
from raymega.plan.run_plan import make_plan
from raymega.plugins import BUILT_IN, Plugin, Registry, call_plugin, registry_of, with_versions
from raymega.storage.registry import BACKENDS, open_store
from raymega.tracking.trackers.named import NamedRecorder
from raymega.tracking.trackers.selection import chosen_trackers
from raymega.train.build_model import plugin_loss
from raymega.train.plugin_hooks import PluginHooks
from tests.support.jobs import VERIFY
from tests.support.outside_package import USES, options, write_package
from tests.support.params import ALONE
from tests.unit.model.parts import make_model_factory

MODULES = ("acme.plugins",)


FAULTS = {
    "lr_schedule": ("parts.py", "1 // 0"), "metric": ("parts.py", "train/los\""), "callback": ("parts.py", "_wirte"),
    "tracker": ("csv_tracker.py", "floder"), "loss": ("tensors.py", "gama"), "optimizer": ("tensors.py", "_) ="),
    "activation": ("tensors.py", "sigmoit"), "data_source": ("rows.py", "% modulo"), "transform": ("rows.py", "/ 4"),
    "store": ("store.py", "kee"), "norm": ("tensors.py", "tahn"),
}  # fmt: skip
"""File and word of the line that fails, by kind."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the package; nothing of it stays imported."""
    write_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_PARTS", dict(plugins._PARTS))
    forget()
    yield tmp_path
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def forget():
    registry_of.cache_clear()
    plugins._loaded.cache_clear()


def change(folder, file, old, new):
    path = folder / "acme" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def refused(*overrides):
    with pytest.raises(ConfigError) as found:
        load_job(VERIFY, [*USES, options("."), *overrides])
    return str(found.value)


def hooks_of(folder):
    job = load_job(VERIFY, [*USES, options(folder)])
    return PluginHooks(make_plan(job), replace(ALONE.world, index=1))


def test_package_of_the_page_is_a_job(folder):
    job = load_job(VERIFY, [*USES, options(folder), "optimizer.lr_warmup_steps=0"])
    assert [row.name for row in chosen_trackers(job)] == ["acme.csv"]
    rates = [
        learning_rate(job.optimizer, total_steps=4, step=step, plugins=job.plugins)
        for step in range(4)
    ]
    assert rates == [job.optimizer.lr * share for share in (0.5, 1.0, 0.5, 0.0)]


def test_callbacks_and_metrics_get_what_is_reported(folder):
    hooks = hooks_of(folder)
    metrics = {"train/loss": 0.6931471805599453}
    hooks.step_begins(1)
    assert hooks.metrics(1, metrics) == {"plugin/metric/acme.bits": 1.0}
    hooks.step_ends(1, metrics)
    hooks.evaluation_ends(1, {"eval/loss": 2.0})
    hooks.checkpoint_begins(1, is_due=True)
    hooks.checkpoint_begins(2, is_due=False)
    (file,) = folder.glob("calls-*-1.txt")
    assert file.read_text().splitlines() == [
        "begin 1", "end 1 0.6931471805599453", "evaluation 1 2.0", "checkpoint 1",
    ]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('kind="metric"', 'kind="metrics"', "has kind='metrics'"),
        ('"acme.bits"', '"bits"', "names without a dot are raymega's own"),
        ('"acme.parts:bits"', '"acme.parts.bits"', "it reads package.module:attribute"),
        ("PLUGINS = (", "import torch\nPLUGINS = (", "importing acme.plugins imports torch"),
        ("PLUGINS = (", "PLUGINS = 1 / 0, (", "acme/plugins.py:16: division by zero"),
        ("PLUGINS = (", "PLUGIN = (", "has no attribute 'PLUGINS'"),
        ("PLUGINS = (", "PLUGINS = )(", "acme/plugins.py:16"),
    ],
)
def test_faulty_list_is_refused_before_anything_starts(folder, monkeypatch, old, new, told):
    # a driver has no torch, as test_house.py shows
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    if "torch" in new:
        (folder / "torch.py").touch()
        monkeypatch.syspath_prepend(folder)
    change(folder, "plugins.py", old, new)
    assert told in refused()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("plugins.modules=[acme.plugin]", "No module named 'acme.plugin'"),
        ("plugins.modules=[acme.plugins==7.0]", "plugins names acme.plugins==7.0, and here is no wheel of it"),
        ("plugins.callbacks=[acme.step]", "write acme.steps"),
        ("model.loss=acme.fokal", "write acme.focal"),
        ("model.family=acme.stablel", "write acme.stablelm"),
        ("optimizer.name=acme.nestorov", "write acme.nesterov"),
        ("data.path='acme.sqares:64'", "write acme.squares"),
        ("data.transforms=[acme.skipp]", "write acme.skip"),
        ("run=3", "override 'run=3'; it must read section.field=value"),
        ("model.z_loss=0.1", "no effect without model.loss=cross_entropy"),
        ("optimizer.beta2=0.9", "no effect without optimizer.name=adamw or lion or muon"),
        ("plugins.options={acme.focal: {gama: 1.0}, acme.steps: {folder: a}}", "acme.focal has gamma"),
        ("plugins.options={acme.focal: {gamma: many}, acme.steps: {folder: a}}", "acme.focal.gamma='many'"),
        ("plugins.options={}", "plugins.options gives acme.steps.folder"),
        ("plugins.options={acme.steps: {folder: a}, acme.skip: {n: 1}}", "the transform acme.skip has no options"),
        ("plugins.options={acme.steps: {folder: a}, acme.lost: {n: 1}}", "the job uses no such part"),
        ("plugins.metrics=[acme.steps]", "plugins.metrics names 'acme.steps'"),
        ("optimizer.lr_schedule=acme.triangel", "write acme.triangle"),
        ("tracking.trackers=[acme.cvs]", "write acme.csv"),
    ],
)  # fmt: skip
def test_name_that_is_in_no_list_is_refused(folder, setting, told):
    assert told in refused(setting)


def test_pairs_have_no_loss_of_tokens_and_their_stored_reference_no_transforms(folder):
    told = refused("preference.loss_type=sigmoid", "preference.reference=stored")
    assert "model.loss=acme.focal with preference.loss_type=sigmoid" in told
    assert "data.transforms=[acme.skip] with preference.reference=stored" in told


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_pairs": 2}, "changed num_pairs"),
        ({"token_types": np.zeros(32, dtype=np.int64)}, "changed token_types"),
    ],
)
def test_transform_that_drops_pairs_or_segments_is_refused(folder, fields, told):
    job = load_job(VERIFY, [*USES, options(folder)])
    (transform,) = transforms_of(job, "train")
    whole = whole_row(np.zeros(33, dtype=np.int64))
    kept = transform(replace(whole, **fields), 0)
    assert all(np.array_equal(getattr(kept, name), value) for name, value in fields.items())
    # a new row in place of a changed one
    change(folder, "rows.py", "replace(row, mask=mask)",
           "type(row)(tokens=row.tokens, labels=row.labels, mask=mask, documents=row.documents)")  # fmt: skip
    forget()
    del sys.modules["acme.rows"]
    (transform,) = transforms_of(load_job(VERIFY, [*USES, options(folder)]), "train")
    with pytest.raises(ConfigError, match=told):
        transform(replace(whole, **fields), 0)


def test_each_kind_that_fails_is_named_with_its_line(folder):
    change(folder, "parts.py", "return 1 - abs", "return 1 // 0 - abs")
    change(folder, "parts.py", '"train/loss"] / log(2)', '"train/los"] / log(2)')
    change(folder, "parts.py", 'self._write(f"begin {step}")', "self._wirte(step)")
    change(folder, "csv_tracker.py", "setup.folder.mkdir", "setup.floder.mkdir")
    change(folder, "tensors.py", "** options.gamma", "** options.gama")
    change(folder, "tensors.py", "(momenta,) =", "(momenta, _) =")
    change(folder, "tensors.py", "torch.sigmoid(x)", "torch.sigmoit(x)")
    change(folder, "tensors.py", "torch.tanh(alpha", "torch.tahn(alpha")
    change(folder, "rows.py", "% modulus", "% modulo")
    change(folder, "rows.py", "len(mask) // 4", "len(mask) / 4")
    change(folder, "store.py", '"length(data)", key', '"length(data)", kee')
    hooks, job = (
        hooks_of(folder),
        load_job(VERIFY, [*USES, options(folder), "optimizer.lr_warmup_steps=0"]),
    )
    section = job.optimizer
    tracker = registry_of(MODULES).find("tracker", "acme.csv")
    logits = VocabLogits(
        torch.ones(1, 1, 4, requires_grad=True), tp=ALONE.tp, terms=LossTerms(vocab_size=4), is_fused=False,
    )  # fmt: skip
    one = torch.ones(2)
    states = [ParamState(param=None, master=one, gradient=one.clone(), state=(one.clone(),))]
    group = make_update_group(states, step=one[0], lr=1.0, weight_decay=0.0, divisor=None)
    row = whole_row(np.zeros(33, dtype=np.int64))
    (transform,) = transforms_of(job, "train")
    norm = make_norm(make_model_factory(job.model), "final_norm", job.model)
    store = open_store(f"acme.sqlite://{folder}/objects")
    store.put("a", [b"1"], overwrite=False)
    for call, told in (
        (lambda: learning_rate(section, total_steps=4, step=0),
         "lr_schedule acme.triangle raised ZeroDivisionError at "),
        (lambda: hooks.metrics(1, {"train/loss": 1.0}), "metric acme.bits raised KeyError at "),
        (lambda: hooks.step_begins(1), "callback acme.steps raised AttributeError at "),
        (lambda: call_plugin(tracker, lambda: tracker.load()(None)),
         "tracker acme.csv raised AttributeError at "),
        (lambda: NamedRecorder(tracker, lambda: tracker.load()(None)),
         "tracker acme.csv raised AttributeError at "),
        (lambda: plugin_loss(job)(logits, torch.zeros(1, 1, dtype=torch.int64)),
         "loss acme.focal raised AttributeError at "),
        (lambda: update_code(section, job.plugins, "acme.nesterov")(group),
         "optimizer acme.nesterov raised ValueError at "),
        (lambda: named_activation("acme.swish")(torch.ones(2)), "activation acme.swish raised AttributeError at "),
        (lambda: norm(torch.ones(1, 1, 32).double()), "norm acme.tanh raised AttributeError at "),
        (lambda: open_samples(job).row(0), "data_source acme.squares raised NameError at "),
        (lambda: transform(row, 0), "transform acme.skip raised TypeError at "),
        (lambda: store.size("a"), "store acme.sqlite raised NameError at "),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as found:
            call()
        text = str(found.value)
        kind = told.partition(" ")[0]
        file, word = FAULTS[kind]
        lines = (folder / "acme" / file).read_text().splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if word in line]
        assert told in text and f"/acme/{file}:{number}:" in text, text


@pytest.mark.parametrize("share", ["float('nan')", "-1.0"])
def test_schedule_that_returns_no_share_is_refused(folder, share):
    change(folder, "parts.py", "return 1 - abs", f"return {share} + 0 * abs")
    registry_of(MODULES)
    section = OptimizerSection(lr=1.0, lr_schedule="acme.triangle")
    with pytest.raises(ConfigError, match=r"lr_schedule acme\.triangle returned"):
        learning_rate(section, total_steps=4, step=0)


def test_own_parts_are_there():
    """The table names code by strings; each of them leads somewhere, and fields and tables have the same names."""
    assert all(row.load() is not None for row in BUILT_IN)
    registry = Registry()
    assert registry.names("callback") == []
    fields = {"family": (ModelSection, "family"), "loss": (ModelSection, "loss"),
              "optimizer": (OptimizerSection, "name"), "lr_schedule": (OptimizerSection, "lr_schedule")}  # fmt: skip
    for kind, (section, field) in fields.items():
        literal, _ = get_args(section.model_fields[field].annotation)
        assert sorted(registry.names(kind)) == sorted(get_args(literal))
    tables = {"family": FAMILY_PARTS, "hf_family": HF_FAMILIES, "optimizer": KINDS, "activation": ACTIVATIONS,
              "store": BACKENDS, "norm": NORM_KINDS}  # fmt: skip
    for kind, table in tables.items():
        assert sorted(registry.names(kind)) == sorted(table)


def test_short_form_of_the_job_file_lists_modules(folder):
    text = VERIFY.read_text() + "\nplugins: [acme.plugins]\n"
    (folder / "job.yaml").write_text(text)
    assert load_job(folder / "job.yaml").plugins.modules == MODULES


@pytest.mark.wide
def test_wheel_is_found_by_its_entry_point_and_its_version_is_kept(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(folder)], check=True)
    code = (
        "from raymega.api import load_job; "
        f"print(load_job({str(VERIFY)!r}, {['plugins.modules=[acme]', *USES[1:], options('.')]!r}).plugins.modules)"
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    path = f"import sys; sys.path.insert(0, {str(target)!r}); "
    done = subprocess.run(
        [sys.executable, "-c", path + code], cwd=elsewhere, capture_output=True, text=True
    )
    assert done.stdout.strip() == "('acme==1.2',)", done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("class FocalOptions:\n    pass", "it is a dataclass or a pydantic model"),
        ('@dataclass\nclass FocalOptions:\n    gamma: "Nowhere" = 2.0', "it is a dataclass or a pydantic model"),
        ("FocalOptions = dict", "it is a dataclass or a pydantic model"),
        ("@dataclass\nclass FocalOptions:\n    gamma: float\n    def __post_init__(self):\n        {}[1]",
         "options of acme.focal raised KeyError at "),
    ],
)  # fmt: skip
def test_options_that_no_job_file_can_write_are_refused(folder, options, told):
    text = (folder / "acme" / "plugins.py").read_text()
    begin, end = text.index("@dataclass"), text.index("\n\n\n@dataclass(frozen=True)\nclass Log")
    change(folder, "plugins.py", text[begin:end], options)
    assert told in refused()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('norm="layer_norm"', 'norms="inside"', "family acme.stablelm has norms='inside'; input should be"),
        ('norm="layer_norm"', 'biased=frozenset({"attention.qq"})', "has biased=['attention.qq']; layers with a bias are"),
        ('norm="layer_norm"', 'is_encoder_decoder=True, norms="after"', "has norms='after'; blocks of two streams are T5's"),
        ("width_powers=(0.0, 1.0)", "width_powers=(0.0,)", "optimizer acme.nesterov has width_powers"),
        ('update="acme.tensors:apply_nesterov"', 'update=""', "has update=''; it reads package.module:attribute"),
        ('apply="acme.tensors:scaled_tanh"', 'apply="tanh"', "norm acme.tanh has apply='tanh'; it reads package.module"),
        ("kept=1", "kept=-1", "norm acme.tanh has kept=-1; it is 0 or more"),
        ('"alpha":', '"a.b":', "norm acme.tanh has tensors=['a.b']; a tensor's name is a word"),
        ('init="zeros"', 'init="twos"', "norm acme.tanh has tensors.bias.init='twos'"),
        ('norm="acme.tanh"', 'norm="acme.tan"', "family acme.tanh names 'acme.tan'"),
    ],
)  # fmt: skip
def test_declarations_without_a_meaning_are_refused(folder, old, new, told):
    change(folder, "declarations.py", old, new)
    family = "acme.stablelm" if "stablelm" in told or "layer_norm" in old else "acme.tanh"
    assert told in refused(f"model.family={family}")


def test_family_of_a_plug_in_may_have_the_clamped_gate(folder):
    change(folder, "declarations.py", 'activation="acme.swish"', 'activation="clamped_silu"')
    family = "model.family=acme.stablelm"
    job = load_job(VERIFY, [*USES, options(folder), family, "model.swiglu_limit=5.0"])
    assert job.model.swiglu_limit == 5.0
    for module in ("acme", "acme.plugins", "acme.declarations"):
        sys.modules.pop(module, None)
    forget()
    change(folder, "declarations.py", 'norm="layer_norm"', 'norm="layer_norm", has_gate=False')
    assert "names 'clamped_silu'" in refused(family)


def test_callback_without_a_method_is_refused_before_the_first_step(folder):
    change(folder, "parts.py", "def checkpoint_begins", "def checkpoint_began")
    with pytest.raises(ConfigError, match=r"callback acme\.steps has no checkpoint_begins"):
        hooks_of(folder)


def test_run_keeps_the_options_of_its_loss_and_data(folder):
    def job(*overrides):
        return load_job(VERIFY, [*USES, *overrides])

    then = identity_of(job(options("a", gamma=1.5)))
    assert not identity_faults("r", then, job(options("b", gamma=1.5)))  # callbacks may change
    (fault,) = identity_faults("r", then, job(options("a", gamma=3.0)))
    assert "plugins.options.acme.focal.gamma=3.0" in fault.fact
    written = identity_of(
        job("plugins.options={acme.steps: {folder: a}, acme.focal: {gamma: 2.0}}")
    )
    assert written == identity_of(job("plugins.options={acme.steps: {folder: a}}")), "the default"
    del then["plugins"]
    assert not identity_faults("r", then, job(options("a", gamma=3.0)))  # older records lack it


def test_checkpoint_does_not_import_a_module_of_the_working_folder(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [at for at in sys.path if at not in ("", ".", str(folder))])
    model = load_job(VERIFY).model.model_dump(mode="json")
    saved = {"model": model, "plugins": {"modules": ["acme.plugins"]}}
    # a family of the package needs no module
    tuned_model_of(SimpleNamespace(key="manifest", job=saved))
    assert "acme.plugins" not in sys.modules
    model["family"] = "acme.stablelm"
    with pytest.raises(ConfigError) as found:
        tuned_model_of(SimpleNamespace(key="manifest", job=saved))
    assert "PYTHONPATH" in str(found.value) and "acme.plugins" not in sys.modules
    # somebody who trusts the folder says so
    monkeypatch.syspath_prepend(folder)
    read = tuned_model_of(SimpleNamespace(key="manifest", job=saved))
    assert read.family == "acme.stablelm" and parts_of(read).norm == "layer_norm"


def test_time_out_of_a_collective_inside_a_plugin_keeps_its_class_and_names_the_plugin(folder):
    row = Plugin(kind="callback", name="acme.steps", target="acme.parts:StepLog")

    def time_out():
        raise CommunicationError("all_reduce on world failed after 20.0 s")

    def twice():
        call_plugin(row, time_out)

    with pytest.raises(CommunicationError) as found:
        call_plugin(row, twice)
    first, second = found.value.faults
    assert "20.0 s" in first.fact and second.fact.startswith(
        "it was raised in callback acme.steps at "
    )


def test_own_parts_fail_with_their_own_errors():
    """An error inside a part of the package, such as memory that is short, is no fault of the job file."""
    with pytest.raises(ZeroDivisionError):
        call_plugin(BUILT_IN[0], lambda: 1 / 0)


def test_rows_of_another_form_are_refused(folder):
    job = load_job(VERIFY, [*USES, options(folder)])
    for old, new, told in (
        ("% modulus", "% 4096", "has tokens from"),
        ("squares(i, seq_len + 1)", "squares(i, seq_len)", "they are [32] int64"),
        ("dtype=np.int64", "dtype=np.int32", "int32"),
    ):
        text = (folder / "acme" / "rows.py").read_text()
        change(folder, "rows.py", old, new)
        forget()
        sys.modules.pop("acme.rows", None)
        importlib.invalidate_caches()
        with pytest.raises(ConfigError, match=r"data_source acme\.squares has") as found:
            open_samples(job).row(0)
        assert told in str(found.value)
        (folder / "acme" / "rows.py").write_text(text)


PACKED = ("data.packing=best_fit", "data.document_multiple=8")


def test_documents_of_a_plug_in_are_packed_as_those_of_a_dataset(folder):
    """Tokens are the documents' own, whole or cut after S, and no label crosses a border."""
    job = load_job(VERIFY, [*USES, options(folder), *PACKED, "data.transforms=[]"])
    samples, seq_len = open_samples(job), job.data.seq_len
    shape = SimpleNamespace(packing="best_fit", seq_len=seq_len)
    setup = SimpleNamespace(path="acme.squares:64", split="train", shape=shape)
    documents, seen = sys.modules["acme.rows"].open_squares(setup), []
    for number in range(300):
        row = samples.row(number)
        for piece in samples.held(number):
            tokens = documents.read(piece.document, piece.first, piece.first + piece.length)
            at = slice(piece.start, piece.start + piece.length)
            assert row.tokens[at].tolist() == tokens.tolist() and row.mask[at][:-1].all()
            seen.append((piece.document, piece.first))
    assert len(seen) == len(set(seen)) > 200


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('if setup.shape.packing != "none"', "if False", "returned WindowSource, and data.packing=best_fit"),
        ("squares(0, lengths[number])", "squares(0, 3)", "of [3] int64; its length is"),
        ("lengths = 1 +", "lengths = 0 *", "has lengths [1024] int64; they are [N] integers, at least 1"),
        ("np.arange(1 << 10) *", "np.arange(0) *", "has lengths [0] int64; they are [N] integers, at least 1"),
        ("% modulus", "+ modulus", "they are below model.vocab_size="),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_packed_are_refused(folder, old, new, told):
    change(folder, "rows.py", old, new)
    job = load_job(VERIFY, [*USES, options(folder), *PACKED])
    with pytest.raises(ConfigError) as found:
        open_samples(job).row(0)
    assert told in str(found.value)


@pytest.mark.parametrize(
    ("head", "told"),
    [("sequence_classification", "reads classes"), ("multiple_choice", "reads choices")],
)
def test_documents_of_a_plug_in_have_no_labels(folder, head, told):
    others = f"model.head.kind={head}", "model.loss=cross_entropy", "plugins.callbacks=[]"
    job = load_job(VERIFY, [*USES, *PACKED, *others])
    with pytest.raises(ConfigError, match=told):
        open_samples(job)


def test_documents_need_packing(folder):
    change(folder, "rows.py", 'if setup.shape.packing != "none"', "if True")
    with pytest.raises(ConfigError, match=r"returned DocumentSource, and data.packing=none"):
        open_samples(load_job(VERIFY, [*USES, options(folder)]))


def test_faulty_module_keeps_its_name_in_the_job():
    assert with_versions(["no.such.module"]) == ("no.such.module",)
