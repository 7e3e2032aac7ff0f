"""Fetches saved boxes: small neighbours in one request, large boxes row by row, all verified.

Where the values go is the caller's. It takes host memory for NUM_FETCHES requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from isal.isal_zlib import crc32

from raymega.checkpoint.format.data_file import check_block, missing_file
from raymega.checkpoint.format.manifest import Manifest
from raymega.messages import Box, SavedBox
from raymega.storage.registry import local_path
from raymega.storage.store import ReadsInto, Store

LOCAL_BYTES, REMOTE_BYTES = 2**20, 16 * 2**20
"""Length of a request. From a disk as much as stays in a core's cache until it is checked and copied:
twice as fast as 32 MiB. From an object store so much that its answer takes longer than its waiting."""
GAP_BYTES = 2**18
"""So much that nobody needs is read along, because another request would take longer."""
DIRECT_BYTES = 2**16
"""From this size on a box is read by itself to where it belongs; below, one request for several and a
copy of each take less."""
NUM_FETCHES = 4
"""Requests at once."""

Use = Callable[[SavedBox, Box, memoryview | None], None]
Place = Callable[[SavedBox], memoryview | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Bytes ``start`` to ``stop`` of a file, and the boxes in them that are wanted, in order.

    ``place`` is where the only box belongs, if its bytes can lie there as they are in the file.
    """

    key: str
    start: int
    stop: int
    boxes: tuple[SavedBox, ...]
    place: memoryview | None = field(default=None, compare=False)

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
    place_of: Place = lambda _: None,
) -> int:
    """Call ``use`` with every box, a long one in parts, and return how many bytes were fetched.

    Args:
        store: The run's store.
        manifest: Lists the boxes.
        boxes: Those that are wanted, in any order.
        use: Called from several threads with a box, some rows of it in global indices, and their
            bytes, which are gone when it returns. Only a box in one part is verified by then.
        num_fetches: Requests at once; 1 keeps to this thread.
        place_of: The memory where a box's bytes belong as they are, if there is such. Where the store
            has filled it, ``use`` gets no bytes.

    Raises:
        CheckpointError: The first file, by name, whose bytes are missing or not as written.
    """
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
    requests = [*direct, *plan_requests(manifest, others, size)]
    if num_fetches == 1 or len(requests) < 2:
        for request in requests:
            _carry_out(store, request, use, size)
    else:
        _carry_out_all(store, requests, use, size, num_fetches)
    return sum(request.num_bytes for request in requests)


def plan_requests(manifest: Manifest, boxes: Iterable[SavedBox], size: int) -> list[Request]:
    """Few requests of at most ``size`` bytes, in order of the files; a longer box is one by itself.

    Bytes that stand for several boxes are read once.
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
    """In threads, none of which is at work any more when this returns or raises."""
    with ThreadPoolExecutor(num_fetches, thread_name_prefix="fetch") as pool:
        pending = [pool.submit(_carry_out, store, request, use, size) for request in requests]
        try:
            for future in pending:
                future.result()
        except BaseException:
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
    """A box without a copy of it; each piece is verified while it is in the core's cache."""
    (saved,) = request.boxes
    checksum = num_bytes = 0
    for piece in store.read_into(request.key, place, start=request.start, piece_bytes=size):
        checksum, num_bytes = crc32(piece, checksum), num_bytes + len(piece)
    check_block(request.key, saved, num_bytes=num_bytes, checksum=checksum)
    use(saved, saved.box, None)


def _get_together(store: Store, request: Request, use: Use) -> None:
    """All boxes at once, each verified before it is used."""
    data = memoryview(store.get(request.key, start=request.start, num_bytes=request.num_bytes))
    for saved in request.boxes:
        first = saved.start - request.start
        part = data[first : first + saved.num_bytes]
        check_block(request.key, saved, num_bytes=len(part), checksum=crc32(part))
        use(saved, saved.box, part)


def _stream(store: Store, key: str, saved: SavedBox, use: Use, size: int) -> None:
    """Rows by rows, each used while it is in the core's cache; verified at the end."""
    checksum, at = 0, 0
    for part, num_bytes in _parts(saved, size):
        data = memoryview(store.get(key, start=saved.start + at, num_bytes=num_bytes))
        at += len(data)
        if len(data) < num_bytes:
            break
        checksum = crc32(data, checksum)
        use(saved, part, data)
    check_block(key, saved, num_bytes=at, checksum=checksum)


def _parts(saved: SavedBox, size: int) -> Iterator[tuple[Box, int]]:
    """Blocks of whole rows of at most ``size`` bytes, or of one row, and the bytes of each."""
    num_rows = saved.box.shape[0]
    row_bytes = saved.num_bytes // num_rows
    step = max(1, size // row_bytes)
    for row in range(0, num_rows, step):
        part = saved.box.rows(row, min(step, num_rows - row))
        yield part, part.shape[0] * row_bytes
