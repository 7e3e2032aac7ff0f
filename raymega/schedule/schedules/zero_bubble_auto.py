"""zb_auto: the best of many zero-bubble orders that stay within a limit on activations.

It owns the search, after Qi et al., ICLR 2024 (https://arxiv.org/abs/2401.10241, section 3.1).
Orders are built by `raymega.schedule.list_scheduling`. The search first tries ZB-H1, ZB-H2 and
every policy with the same choices on all ranks. Then it changes the best policy's choices on single
ranks at random, until its budget is spent or the order has no bubble. The budget counts tasks
placed, not seconds, because every rank must find the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, product
from random import Random

from raymega.schedule.instructions import Op, Schedule
from raymega.schedule.list_scheduling import FORWARD, INPUT, NEVER, WEIGHT, Played, Policy, play
from raymega.schedule.order import Order, Sizes
from raymega.schedule.schedules.zero_bubble import zb_h1, zb_h2
from raymega.schedule.simulate import simulate
from raymega.schedule.stage_placement import Placement
from raymega.schedule.transfers import make_program

MOST_TASKS, MOST_ORDERS = 1_000_000, 500
"""Limits of the whole search: tasks placed, at one or two microseconds each, and orders built."""
MOST_KEPT = 64
"""Number of sizes whose orders are cached."""
LETTERS = {Op.FORWARD: FORWARD, Op.BACKWARD_INPUT: INPUT, Op.BACKWARD_WEIGHT: WEIGHT}
CLOSE = 1e-9
"""Relative difference below which two times count as equal."""


@lru_cache(maxsize=MOST_KEPT)
def zb_auto(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank, holding at most ``max_in_flight_microbatches`` (0: ``pp``).

    Results are cached: later steps of the same process, in this attempt of a run or the next, may
    have the same sizes.
    """
    search = _Search(sizes)
    search.try_known(zb_h1(sizes))
    search.try_known(zb_h2(sizes))
    search.try_all_ranks_alike()
    search.change_single_ranks()
    return tuple(_work(word, sizes.num_micro_batches) for word in search.words)


def peak(word: str, wgrad_activation_fraction: float) -> float:
    """Return the most activations that a rank with the work ``word`` holds, in micro-batches."""
    change = {
        FORWARD: 1.0,
        INPUT: wgrad_activation_fraction - 1.0,
        WEIGHT: -wgrad_activation_fraction,
    }
    return max(accumulate(change[letter] for letter in word))


class _Search:
    """State of the search: the best order so far, and the budget that is left."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, times = sizes, sizes.times
        self._num_tasks = 3 * sizes.pp * sizes.num_micro_batches
        self._left = min(MOST_ORDERS, 1 + MOST_TASKS // self._num_tasks)
        self._ideal = sizes.num_micro_batches * (times.forward + times.backward)
        self._longest = NEVER
        self._policy: Policy | None = None
        self._best = (NEVER, NEVER)
        self.words: tuple[str, ...] = ()

    @property
    def _is_over(self) -> bool:
        return self._left <= 0 or self._longest <= self._ideal * (1 + CLOSE)

    def try_known(self, work: tuple[Schedule, ...]) -> None:
        """Adopt a published schedule if it stays within the limit and is the best so far."""
        words = tuple("".join(LETTERS[task.op] for task in list_) for list_ in work)
        limit = self._sizes.max_in_flight_microbatches or self._sizes.pp
        if max(peak(word, self._sizes.wgrad_activation_fraction) for word in words) > limit + CLOSE:
            return
        program = make_program(work, Placement(pp=self._sizes.pp))
        longest = self._ideal * (1 + simulate(program, self._sizes.times).bubble)
        if longest < self._longest:
            self._longest, self.words = longest, words

    def try_all_ranks_alike(self) -> None:
        """Try every policy whose choices are the same on all ranks."""
        for policy in _alike(self._sizes):
            if not self._is_over:
                self._try(policy)

    def change_single_ranks(self) -> None:
        """Change the best policy on few ranks at a time; keep a change that is no worse."""
        # A fixed seed: every rank must find the same order.
        random = Random(0)
        while not self._is_over and self._policy is not None:
            self._try(_changed(self._policy, self._sizes, random))

    def _try(self, policy: Policy) -> None:
        self._left -= 1
        played = play(self._sizes, policy)
        # Equal cost is accepted, so that the search drifts across plateaus.
        if self._policy is None or self._cost(played) <= self._best:
            self._best, self._policy = self._cost(played), policy
        if played.longest < self._longest * (1 - CLOSE):
            self._longest, self.words = played.longest, played.words

    @staticmethod
    def _cost(played: Played) -> tuple[float, float]:
        """Return the longest time, and the idle time, which shows a change of a single rank."""
        return played.longest, sum(played.idle)


def _alike(sizes: Sizes) -> Iterator[Policy]:
    """Yield all policies with equal choices on all ranks, those usually best first."""
    below = [sizes.pp - rank - 1 for rank in range(sizes.pp)]
    leads = [(sizes.num_micro_batches,) * sizes.pp]
    leads += [tuple(1 + hops * ahead for hops in below) for ahead in (1, 2)]
    for in_flight, patience, delay, is_alternating, is_balancing in product(
        leads, (0.0, 1.0, 0.5), (0.0, 0.5, NEVER), (False, True), (False, True)
    ):
        if patience == 0.0 and is_balancing:
            continue  # is_balancing has no effect on a rank that never waits
        yield Policy(
            in_flight=in_flight,
            patience=(patience,) * sizes.pp,
            delay=delay,
            is_alternating=is_alternating,
            is_balancing=is_balancing,
        )


def _changed(policy: Policy, sizes: Sizes, random: Random) -> Policy:
    """Return the policy with one to three random changes, each of one rank's choice."""
    in_flight, patience = list(policy.in_flight), list(policy.patience)
    for _ in range(random.choice((1, 1, 2, 3))):
        rank = random.randrange(sizes.pp)
        if random.random() < 0.5:
            in_flight[rank] = max(1, in_flight[rank] + random.choice((-2, -1, 1, 2)))
        else:
            patience[rank] = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
    return replace(policy, in_flight=tuple(in_flight), patience=tuple(patience))


def _work(word: str, num_micro_batches: int) -> Schedule:
    order = Order(num_micro_batches)
    for letter in word:
        if letter == FORWARD:
            order.forward()
        elif letter == INPUT:
            order.backward_input()
        else:
            order.backward_weight()
    return order.work
