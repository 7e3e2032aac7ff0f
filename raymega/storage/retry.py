"""RetryPolicy: how often an operation on a store is tried again, and after which pauses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from raymega.errors import StorageError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Pauses between tries.

    Attributes:
        pauses_s: Seconds before the second try, the third, and so on; the last try's error is raised.
        sleep: Waits so many seconds.
    """

    pauses_s: tuple[float, ...]
    sleep: Callable[[float], None] = time.sleep

    def run(self, write: Callable[[int], Result]) -> Result:
        """Call ``write`` with the number of the try, from 0, until it returns.

        Raises:
            FileExistsError: At once: another try would change nothing.
            StorageError, OSError: The last try failed.
        """
        for number, pause_s in enumerate(self.pauses_s):
            try:
                return write(number)
            except FileExistsError:
                raise
            except (StorageError, OSError) as error:
                log.warning("write failed, next try in %g s: %s", pause_s, error)
                self.sleep(pause_s)
        return write(len(self.pauses_s))
