"""A driver as a process of its own, for tests that kill it: ``python -m tests.support.driver DIR``.

It prints what happens as lines and exits with the run's code.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raymega.errors import RaymegaError
from raymega.events import StepFinished, WorkersStarted
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.driver.signals import stop_on_signals
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.session import close_session, open_session
from raymega.storage.registry import open_store
from tests.support.jobs import make_test_plan


class PrintSink:
    def emit(self, event):
        if isinstance(event, WorkersStarted):
            # lines for the test that started this process; flushed, as it may be killed at any time
            print("pids", *event.pids.values(), flush=True)
        if isinstance(event, StepFinished):
            print("step", event.step, flush=True)

    def close(self, timeout_s):
        pass


def main(folder, *overrides):
    plan = make_test_plan("optimizer.lr_warmup_steps=0", *overrides)
    clock, store = SystemClock(), open_store(str(folder / "run"))
    lease = Lease(store, holder=this_process(), duration_s=plan.job.elastic.lease_s, clock=clock)
    with hold_lease(lease), ThreadPoolExecutor(1) as executor:
        # a cluster of its own, which ends with this process
        open_session("local", num_cpus=2)
        group = RayWorkerGroup(plan, log_dir=folder, can_grow=False, entry="tests.support.entries")
        controller = Controller(
            RunContext(
                plan,
                lease=lease,
                group=group,
                sink=PrintSink(),
                clock=clock,
                executor=executor,
            )
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
        print("error", type(error).__name__, error, flush=True)
        sys.exit(error.exit_code)
