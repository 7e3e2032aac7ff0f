"""The figure of a drill: both curves, the faults, and the time by cause."""

import xml.etree.ElementTree as ET
from types import SimpleNamespace as Fake

from raymega.chaos.driver_process import DriverOutput
from raymega.chaos.plot import draw_verdict


def _steps(*losses):
    return [
        DriverOutput(at_s=0.0, event={"event": "step", "step": step, "loss": loss})
        for step, loss in enumerate(losses, start=1)
    ]


def test_figure_has_curves_faults_and_causes(tmp_path):
    fault = Fake(injected=Fake(step=2, fault=Fake(kind="kill-worker")))
    verdict = Fake(
        calm=_steps(3.0, 2.0, 1.0),
        tried=_steps(3.0, 2.1, 1.0),
        incidents=[fault],
        sheet=Fake(wall_s=9.0, by_cause={"steps": 3.0, "recovery": 6.0}),
    )
    path = tmp_path / "chaos.svg"
    draw_verdict(verdict, path, title="demo under faults")
    ET.parse(path)
    for said in (
        "undisturbed",
        "under faults",
        "kill-worker",
        "recovery",
        "Seconds by cause, of 9",
    ):
        assert said in path.read_text()
