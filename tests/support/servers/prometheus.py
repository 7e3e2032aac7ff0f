"""A real Prometheus on this machine for a test's time, and the queries of the dashboard."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.servers.ports import free_port

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "raymega.json"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not PROMETHEUS, reason="no `prometheus` on this machine")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="no `promtool` on this machine")
ANSWER_S = 100.0
RETRY_S = 0.1


def dashboard_queries(window="1m", run=".*"):
    """``(panel title, PromQL)`` of every query, Grafana's variables filled in."""
    for panel in dashboard_panels():
        for target in panel.get("targets", ()):
            yield panel["title"], fill(target["expr"], window=window, run=run)


def dashboard_panels():
    """Yield headings and panels, those of folded rows too."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def fill(expr, *, window="1m", run=".*"):
    """The PromQL that Grafana sends."""
    return expr.replace("$__rate_interval", window).replace("$run", run)


def metric_names(expr):
    """Names of the series that a query selects."""
    # labels may hold words that look like series
    without_labels = re.sub(r"\{[^}]*\}", "", expr)
    return set(re.findall(r"\bray_\w+", without_labels))


class Prometheus:
    """Client of a running Prometheus server."""

    def __init__(self, url):
        self.url = url

    def range(self, expr, *, since, step=1):
        """The answer to a range query from ``since`` to now: a list of series."""
        span = {"query": expr, "start": since, "end": time.time(), "step": step}
        query = urllib.parse.urlencode(span)
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query_range?{query}", timeout=ANSWER_S
        ) as answer:
            return json.load(answer)["data"]["result"]

    def values(self, expr, *, since):
        """All values of all series of the answer."""
        series = self.range(expr, since=since)
        return [float(value) for one in series for _, value in one["values"]]

    def wait_until_up(self, deadline_s):
        while time.monotonic() < deadline_s:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=10).close()
                return
            except OSError:
                time.sleep(RETRY_S)
        raise TimeoutError(f"prometheus at {self.url} is not ready")


@contextmanager
def prometheus_of(ray_session: Path, folder: Path):
    """A Prometheus that scrapes what a Ray session announces, once a second."""
    config = folder / "prometheus.yml"
    config.write_text(_config(ray_session / "prom_metrics_service_discovery.json"))
    address = f"127.0.0.1:{free_port()}"
    command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}")
        server.wait_until_up(time.monotonic() + 100)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ANSWER_S)


def _config(targets: Path) -> str:
    return f"""\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - {{files: ['{targets}'], refresh_interval: 1s}}
"""
