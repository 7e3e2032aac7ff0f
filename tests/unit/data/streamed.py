"""A dataset in a store that counts and fails, and runs on it through a node's cache."""

import threading
from collections import Counter

from raymega.config.data import DataSource
from raymega.data.arrow import TokenStream
from raymega.data.blends.mixture import Mixture
from raymega.data.samples import Samples
from raymega.data.streaming import fetcher as fetching
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.shard_cache import ShardCache
from raymega.data.streaming.stream_rows import StreamSource
from raymega.errors import StorageError
from raymega.storage.local import LocalStore
from raymega.storage.retry import RetryPolicy
from raymega.storage.store import DelegatingStore

IMPATIENT = RetryPolicy(pauses_s=(0.0,))


class CountingStore(DelegatingStore):
    """Counts the bytes read of each object, fails as often as asked, and waits while it is held."""

    def __init__(self, folder):
        super().__init__(LocalStore(folder))
        self.num_bytes, self.failures = Counter(), 0
        self.gate, self._counting = threading.Event(), threading.Lock()
        self.gate.set()

    def get(self, key, *, start=0, num_bytes=-1):
        assert self.gate.wait(200)
        with self._counting:
            is_away = self.failures > 0
            self.failures -= is_away
        if is_away:
            raise StorageError(fact="the store is away", rule="it answers", remedy="wait")
        found = super().get(key, start=start, num_bytes=num_bytes)
        self.num_bytes[key] += len(found)
        return found


def make_fetcher(root, *, limit_bytes=1 << 40, timeout_s=200.0):
    return Fetcher(limit_bytes=limit_bytes, timeout_s=timeout_s, root=root, retry=IMPATIENT)


def source_of(files, split, *, seq_len=8):
    return StreamSource(TokenStream(files, split), seq_len=seq_len, vocab_size=1 << 16)


def samples_on(store, split, fetcher, *, block_bytes, seed=3, name="d"):
    files = ShardCache(store, fetcher.root / name, fetcher)
    return samples_in(files, split, fetcher, block_bytes=block_bytes, seed=seed)


def samples_in(files, split, fetcher, *, block_bytes, seed=3):
    return samples_of_source(
        source_of(files, split), block_bytes=block_bytes, seed=seed, fetcher=fetcher
    )


def samples_of_source(source, *, block_bytes, seed=3, fetcher=None):
    mixture = Mixture([(0, [DataSource(path="alone")])])
    return Samples([source], mixture, seed=seed, block_bytes=block_bytes, fetcher=fetcher)


def settle(fetcher):
    """Wait until the threads have fetched what there is room for, or wait before they try again."""
    with fetcher._changed:
        assert fetcher._changed.wait_for(
            lambda: not fetcher._under_way and fetcher._next() is None, 200
        )


def made_way(fetcher):
    """Return a list that gets each file evicted from now on though it is needed before all that is fetched then.

    A count of bytes would depend on the threads: of two shards that arrive at once the later one may take the room
    first, and make way for the earlier one.
    """
    found, evict = [], fetching._evict

    def evict_and_note(path):
        # looked at before it is gone, as the reader changes its wants meanwhile
        with fetcher._changed:
            is_needed = any(_is_before_all(path, wants, fetcher) for wants in fetcher._all)
        is_gone = evict(path)
        if is_gone and is_needed:
            found.append(path.name)
        return is_gone

    fetching._evict = evict_and_note
    return found


def _is_before_all(path, wants, fetcher):
    places = {wants.folder / file: place for file, place in wants.kept.items()}
    arriving = [places.get(each, -1) for each in fetcher._under_way]
    return path in places and places[path] < min(arriving, default=0)
