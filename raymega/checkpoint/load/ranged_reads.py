"""Fetches saved boxes from a store: small neighbours in one request, large boxes row by row.

Every box is verified. The caller decides where the values go. Host memory: NUM_FETCHES requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from isal.isal_zlib import crc32

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.data_file import check_block, missing_file
from raymega.checkpoint.format.manifest import Manifest
from raymega.storage.registry import local_path
from raymega.storage.store import ReadsInto, Store

LOCAL_BYTES, REMOTE_BYTES = 2**20, 16 * 2**20
"""Length of a request in bytes.

1 MiB of a file stays in a core's cache until it is checked and copied: twice as fast as 32 MiB.
16 MiB of an object store takes longer to transfer than the request's latency."""
GAP_BYTES = 2**18
"""Largest gap between two boxes that one request reads along, because a second request takes longer."""
DIRECT_BYTES = 2**16
"""Smallest box in bytes that is read straight into its tensor; smaller ones share a request and are copied."""
NUM_FETCHES = 4
"""Number of requests at once."""

Use = Callable[[SavedBox, Box, memoryview | None], None]
Place = Callable[[SavedBox], memoryview | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A read of one range of a file.

    Attributes:
        key: Key of the file.
        start: First byte of the range.
        stop: First byte behind the range.
        boxes: Wanted boxes inside the range, in order.
        place: Destination of the only box, where its bytes belong there unchanged; else None.
    """

    key: str
    start: int
    stop: int
    boxes: tuple[SavedBox, ...]
    place: memoryview | None = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        """Length of the range in bytes."""
        return self.stop - self.start


def fetch(
    store: Store,
    manifest: Manifest,
    boxes: Iterable[SavedBox],
    use: Use,
    *,
    num_fetches: int = NUM_FETCHES,
    place_of: Place = lambda _: None,
) -> int:
    """Call ``use`` with every box, a long one in parts, and return how many bytes were fetched.

    Args:
        store: Store of the run.
        manifest: Manifest that lists the boxes.
        boxes: Wanted boxes, in any order.
        use: Function called from several threads with a box, some of its rows as a box in global
            indices, and their bytes, valid only during the call. A box that comes in several parts
            is verified after its last part.
        num_fetches: Number of requests at once; with 1 everything happens in the calling thread.
        place_of: Function that returns the memory into which a box's bytes can be read unchanged,
            or None. Where the store has filled that memory, ``use`` gets None for the bytes.

    Raises:
        CheckpointError: Bytes of a file are missing, or differ from those that were written.
    """
    # Sort boxes: large ones whose bytes fit their tensor unchanged need no buffer and no copy.
    size = REMOTE_BYTES if local_path(store.uri) is None else LOCAL_BYTES
    direct, others = list[Request](), list[SavedBox]()
    can_read_into = isinstance(store, ReadsInto)
    for box in boxes:
        is_long = can_read_into and box.num_bytes >= DIRECT_BYTES
        place = place_of(box) if is_long else None
        if place is None:
            others.append(box)
        else:
            direct.append(_request(manifest, [box], place))
    # Carry the requests out, in this thread where threads would gain nothing.
    requests = [*direct, *plan_requests(manifest, others, size)]
    if num_fetches == 1 or len(requests) < 2:
        for request in requests:
            _carry_out(store, request, use, size)
    else:
        _carry_out_all(store, requests, use, size, num_fetches)
    return sum(request.num_bytes for request in requests)


def plan_requests(manifest: Manifest, boxes: Iterable[SavedBox], size: int) -> list[Request]:
    """Group boxes into requests of at most ``size`` bytes, in order of files; a longer box is alone.

    Bytes that belong to several boxes, as with upcycled experts, are read once.
    """
    requests: list[Request] = []
    gathered: list[SavedBox] = []
    for box in sorted(boxes, key=lambda box: (box.file, box.start)):
        if gathered and not _is_near(gathered, box, size):
            requests.append(_request(manifest, gathered))
            gathered = []
        gathered.append(box)
    if gathered:
        requests.append(_request(manifest, gathered))
    return requests


def _is_near(gathered: Sequence[SavedBox], box: SavedBox, size: int) -> bool:
    last = gathered[-1]
    # The same bytes under another name.
    if (box.file, box.start) == (last.file, last.start):
        return True
    return (
        box.file == last.file
        and box.start - (last.start + last.num_bytes) <= GAP_BYTES
        and box.start + box.num_bytes - gathered[0].start <= size
    )


def _request(
    manifest: Manifest, gathered: Sequence[SavedBox], place: memoryview | None = None
) -> Request:
    last = gathered[-1]
    return Request(
        key=manifest.file_key(last),
        start=gathered[0].start,
        stop=last.start + last.num_bytes,
        boxes=tuple(gathered),
        place=place,
    )


def _carry_out_all(
    store: Store, requests: Sequence[Request], use: Use, size: int, num_fetches: int
) -> None:
    """Carry requests out in threads, all of which have ended when this returns or raises."""
    with ThreadPoolExecutor(num_fetches, thread_name_prefix="fetch") as pool:
        pending = [pool.submit(_carry_out, store, request, use, size) for request in requests]
        try:
            for future in pending:
                future.result()
        except BaseException:
            # Drop what has not begun; leaving the ``with`` waits for requests under way.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _carry_out(store: Store, request: Request, use: Use, size: int) -> None:
    try:
        if request.place is not None:
            _read_in_place(cast(ReadsInto, store), request, request.place, use, size)
        elif request.num_bytes > size and len(request.boxes) == 1:
            _stream(store, request.key, request.boxes[0], use, size)
        else:
            _get_together(store, request, use)
    except KeyError:
        raise missing_file(request.key, request.boxes[0]) from None


def _read_in_place(
    store: ReadsInto, request: Request, place: memoryview, use: Use, size: int
) -> None:
    """Read one box straight into its tensor."""
    (saved,) = request.boxes
    checksum = num_bytes = 0
    # Piece by piece, so that the checksum finds each piece in the core's cache.
    for piece in store.read_into(request.key, place, start=request.start, piece_bytes=size):
        checksum, num_bytes = crc32(piece, checksum), num_bytes + len(piece)
    check_block(request.key, saved, num_bytes=num_bytes, checksum=checksum)
    use(saved, saved.box, None)


def _get_together(store: Store, request: Request, use: Use) -> None:
    """Read all boxes of a request at once, and verify each before its use."""
    data = memoryview(store.get(request.key, start=request.start, num_bytes=request.num_bytes))
    for saved in request.boxes:
        first = saved.start - request.start
        part = data[first : first + saved.num_bytes]
        check_block(request.key, saved, num_bytes=len(part), checksum=crc32(part))
        use(saved, saved.box, part)


def _stream(store: Store, key: str, saved: SavedBox, use: Use, size: int) -> None:
    """Read one large box in groups of rows, use each group at once, and verify the box at the end."""
    checksum, at = 0, 0
    for part, num_bytes in _parts(saved, size):
        data = memoryview(store.get(key, start=saved.start + at, num_bytes=num_bytes))
        at += len(data)
        # The file ends too early: check_block says so.
        if len(data) < num_bytes:
            break
        checksum = crc32(data, checksum)
        use(saved, part, data)
    check_block(key, saved, num_bytes=at, checksum=checksum)


def _parts(saved: SavedBox, size: int) -> Iterator[tuple[Box, int]]:
    """Yield parts of whole rows of at most ``size`` bytes (or one row), with the bytes of each."""
    num_rows = saved.box.shape[0]
    row_bytes = saved.num_bytes // num_rows
    step = max(1, size // row_bytes)
    for row in range(0, num_rows, step):
        part = saved.box.rows(row, min(step, num_rows - row))
        yield part, part.shape[0] * row_bytes
