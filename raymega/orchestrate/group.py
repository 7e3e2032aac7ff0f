"""The worker group as the controller sees it: six verbs and their timing, no Ray.

worker_group implements it on Ray; the tests' fake implements it on lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from raymega.errors import Fault
from raymega.messages import Report, Requests
from raymega.orchestrate.placement import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOrder:
    """What the workers of one attempt shall do; see StartWorker for the fields."""

    plan_json: str
    run_uri: str
    attempt: int
    restore: str


class WorkerGroup(Protocol):
    """The workers of a run, one attempt after the other; called from one thread."""

    def reserve(self, timeout_s: float) -> Fault | None:
        """Ask for the slots, or look again: None when they are held, else what is lacking.

        Blocks at most ``timeout_s``; called until it is None. Slots that are held are kept.

        Raises:
            CapacityError: The cluster has no room, and no node can join it.
        """

    def start(self, order: AttemptOrder) -> None:
        """Begin an attempt on the reserved slots. Never blocks: what happens shows in poll."""

    def members(self) -> Mapping[int, Place]:
        """Where each rank lives; empty until all workers have said so. Never blocks."""

    def poll(self, timeout_s: float) -> list[Report]:
        """Reports in order of arrival; returns with the first, or empty after ``timeout_s``.

        A process that is gone is reported as WorkerDied, once.

        Raises:
            ConfigError: A node that hosts workers cannot take part; none of them has trained.
        """

    def request(self, requests: Requests) -> None:
        """Tell every worker what to do at its next step boundary. Never blocks."""

    def release(self, *, keep_warm: bool) -> None:
        """End the attempt, if there is one; blocks for some seconds at most.

        With ``keep_warm`` the slots are kept, and so are processes that let go of their work;
        without it nothing is left.
        """
