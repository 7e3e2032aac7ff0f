"""Only what needs no Ray; the rest is in tests/ray."""

import pytest
from ray.exceptions import RayActorError

from raymega.orchestrate.workers.actor_calls import death_cause

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tpid: 7 ip: 10.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes
include: (1) the process was killed by the OOM killer due to high memory usage"""
LOST = """The actor died unexpectedly before finishing this task.
\tpid: 7
\tip: 10.0.0.1
The actor died because its node has died. Node Id: 2c"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (KILLED, "Worker unexpectedly exits with a connection error code 2. End of file"),
        (LOST, "The actor died because its node has died. Node Id: 2c"),
        ("something new", "something new"),
    ],
    ids=["killed", "lost", "unknown"],
)
def test_death_cause_is_the_sentence_that_matters(text, cause):
    assert death_cause(RayActorError(error_msg=text)) == cause
