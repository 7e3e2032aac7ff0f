"""The alert rules fire when they should and not when they should not, by promtool's word."""

import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.support.servers.prometheus import PROMTOOL, needs_promtool

FOLDER = Path(__file__).parents[3] / "dashboards"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
CASES = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]


def _promtool(*arguments):
    return subprocess.run(
        [PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=100, check=False
    )


@needs_promtool
def test_rules_pass_promtool_s_check():
    done = _promtool("check", "rules", "alerts.yaml")
    assert done.returncode == 0, done.stderr


@needs_promtool
def test_rules_fire_when_they_should():
    done = _promtool("test", "rules", "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rule_parses_says_what_to_do_and_is_seen_to_fire_and_to_rest(rule):
    assert promql_parser.parse(rule["expr"]) is not None
    assert rule["annotations"].keys() == {"summary", "action"}
    checks = [check for case in CASES for check in case["alert_rule_test"]]
    outcomes = {bool(c["exp_alerts"]) for c in checks if c["alertname"] == rule["alert"]}
    assert outcomes == {True, False}
