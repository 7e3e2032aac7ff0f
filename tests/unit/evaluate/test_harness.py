"""Commands that need lm-eval say which line installs it."""

import sys

import pytest

from raymega.errors import ConfigError
from raymega.evaluate.harness import command
from raymega.evaluate.run import EvalOptions, prepare_evaluation


@pytest.fixture(autouse=True)
def _without_lm_eval(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_yaml_task_without_the_extra_is_refused(tmp_path):
    (tmp_path / "task.yaml").write_text("task: a")
    with pytest.raises(ConfigError) as error:
        prepare_evaluation(str(tmp_path), str(tmp_path / "task.yaml"), None, EvalOptions())
    assert "run `pip install 'raymega[eval]'`" in str(error.value)


def test_the_command_without_the_extra_exits_2(capsys):
    with pytest.raises(SystemExit) as end:
        command.run()
    assert end.value.code == 2
    assert "pip install 'raymega[eval]'" in capsys.readouterr().err
