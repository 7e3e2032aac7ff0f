"""What the driver says when it ends a run: fact, rule and remedy of each way out.

It decides nothing: the controller does, and raises these.
"""

from __future__ import annotations

from raymega.errors import Fault, PreemptedError
from raymega.orchestrate.core.state import RunState
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.storage.store import Store


def stopped(record: RunRecord, state: RunState) -> PreemptedError:
    """The run was asked to stop, and can go on."""
    fault = Fault(
        fact=f"run {record.name!r} stopped with step {state.saved_step} of {record.total_steps} "
        f"saved ({state.reason})",
        rule="a run that is stopped can be continued",
        remedy="start the same job again",
    )
    return PreemptedError(fault)


def nothing_readable(record: RunRecord, store: Store) -> Fault:
    """There were checkpoints, and none can be restored."""
    return Fault(
        fact=f"no checkpoint of run {record.name!r} in {store.uri} can be restored",
        rule="a run that has had checkpoints never begins again from nothing by itself",
        remedy="repair one, or take another run.name to begin again",
    )
