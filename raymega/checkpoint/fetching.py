"""Fetches saved boxes: neighbours of a file in one request, a few requests at once, all verified.

Where the values go is the caller's. It takes host memory for NUM_FETCHES requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raymega.checkpoint.data_file import missing_file, verified
from raymega.checkpoint.manifest import Manifest
from raymega.messages import SavedBox
from raymega.storage.store import Store

REQUEST_BYTES = 32 * 2**20
"""Boxes are joined to requests of at most so many bytes; a longer box is one by itself."""
GAP_BYTES = 2**18
"""So much that nobody needs is read along, because another request would take longer."""
NUM_FETCHES = 4
"""Requests at once."""

Use = Callable[[SavedBox, memoryview], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Bytes ``start`` to ``stop`` of a file, and the boxes in them that are wanted, in order."""

    key: str
    start: int
    stop: int
    boxes: tuple[SavedBox, ...]

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


def fetch(
    store: Store,
    manifest: Manifest,
    boxes: Iterable[SavedBox],
    use: Use,
    *,
    num_fetches: int = NUM_FETCHES,
) -> int:
    """Call ``use`` with every box and its bytes, and return how many bytes were fetched.

    Args:
        store: The run's store.
        manifest: Lists the boxes.
        boxes: Those that are wanted, in any order.
        use: Called once a box, from several threads; the bytes are gone when it returns.
        num_fetches: Requests at once; 1 keeps to this thread.

    Raises:
        CheckpointError: The first file, by name, whose bytes are missing or not as written.
    """
    requests = plan_requests(manifest, boxes)
    if num_fetches == 1 or len(requests) < 2:
        for request in requests:
            _carry_out(store, request, use)
    else:
        _carry_out_all(store, requests, use, num_fetches)
    return sum(request.num_bytes for request in requests)


def plan_requests(manifest: Manifest, boxes: Iterable[SavedBox]) -> list[Request]:
    """The fewest requests that stay within REQUEST_BYTES and GAP_BYTES, in order of the files."""
    requests: list[Request] = []
    gathered: list[SavedBox] = []
    for box in sorted(boxes, key=lambda box: (box.file, box.start)):
        if gathered and not _is_near(gathered, box):
            requests.append(_request(manifest, gathered))
            gathered = []
        gathered.append(box)
    if gathered:
        requests.append(_request(manifest, gathered))
    return requests


def _is_near(gathered: Sequence[SavedBox], box: SavedBox) -> bool:
    last = gathered[-1]
    return (
        box.file == last.file
        and box.start - (last.start + last.num_bytes) <= GAP_BYTES
        and box.start + box.num_bytes - gathered[0].start <= REQUEST_BYTES
    )


def _request(manifest: Manifest, gathered: Sequence[SavedBox]) -> Request:
    last = gathered[-1]
    return Request(
        key=manifest.file_key(last),
        start=gathered[0].start,
        stop=last.start + last.num_bytes,
        boxes=tuple(gathered),
    )


def _carry_out_all(store: Store, requests: Sequence[Request], use: Use, num_fetches: int) -> None:
    """In threads, none of which is at work any more when this returns or raises."""
    with ThreadPoolExecutor(num_fetches, thread_name_prefix="fetch") as pool:
        pending = [pool.submit(_carry_out, store, request, use) for request in requests]
        try:
            for future in pending:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _carry_out(store: Store, request: Request, use: Use) -> None:
    try:
        data = memoryview(store.get(request.key, start=request.start, num_bytes=request.num_bytes))
    except KeyError:
        raise missing_file(request.key, request.boxes[0]) from None
    for box in request.boxes:
        first = box.start - request.start
        use(box, verified(request.key, box, data[first : first + box.num_bytes]))
