"""A driver as a process of its own, for tests that kill it: ``python -m tests.support.driver DIR``.

It prints what happens as lines and exits with the run's code.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raymega.errors import RaymegaError
from raymega.orchestrate.clock import SystemClock
from raymega.orchestrate.controller import Controller
from raymega.orchestrate.signals import stop_on_signals
from raymega.orchestrate.worker_group import RayWorkerGroup
from raymega.session import close_session, open_session
from raymega.storage.open import open_store
from raymega.tracking.sink import StepFinished, WorkersStarted
from tests.support.jobs import make_test_plan


class PrintSink:
    def emit(self, event):
        if isinstance(event, WorkersStarted):
            print("pids", *event.pids.values(), flush=True)
        if isinstance(event, StepFinished):
            print("step", event.step, flush=True)

    def close(self, timeout_s):
        pass


def main(folder, *overrides):
    plan = make_test_plan("optimizer.lr_warmup_steps=0", *overrides)
    open_session("local", num_cpus=2)
    group = RayWorkerGroup(plan, log_dir=folder, can_grow=False, entry="tests.support.entries")
    with ThreadPoolExecutor(1) as executor:
        controller = Controller(
            plan,
            store=open_store(str(folder / "run")),
            group=group,
            sink=PrintSink(),
            clock=SystemClock(),
            executor=executor,
        )
        try:
            with stop_on_signals(controller.request_stop):
                controller.run()
        finally:
            close_session()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except RaymegaError as error:
        sys.exit(error.exit_code)
