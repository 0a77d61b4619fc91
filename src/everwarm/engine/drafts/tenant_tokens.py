"""What the agents of each tenant have heard and said, within a byte budget: others of the same tenant may say it again.

Nothing is shared between tenants: how fast an answer comes would tell one what another has said. Nothing is kept on
disk: a prompt brings its history with it, so that agents that come back after a restart are known again.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from everwarm.kernels import _native

SLICE = 2048
"""Tokens that are stored at a time, which takes less than a millisecond: then other threads may run."""


class TenantTokens:
    """The indexes of all tenants. From any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_tokens = most_bytes // _native.Suffixes.bytes_per_token
        self._lock = threading.Lock()  # of the order of tenants; indexes are used under the GIL
        self._indexes: OrderedDict[str, _native.Suffixes] = OrderedDict()  # the one used latest is the last

    @property
    def size_bytes(self) -> int:
        return sum(index.size_bytes for index in list(self._indexes.values()))

    def of(self, tenant: str) -> _native.Suffixes | None:
        """What its agents have said so far."""
        return self._indexes.get(tenant)

    def forget(self, tenant: str) -> None:
        with self._lock:
            self._indexes.pop(tenant, None)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """An agent has heard and said this. What is there already is not stored again."""
        if self._most_tokens < SLICE:
            return
        with self._lock:
            index = self._indexes.setdefault(tenant, _native.Suffixes(self._most_tokens))
            self._indexes.move_to_end(tenant)
        array = np.asarray(tokens, np.int32)
        for begin in range(0, len(array), SLICE):
            index.absorb(array, begin, min(begin + SLICE, len(array)))
            time.sleep(0)
        with self._lock:
            while self.size_bytes > self._most_bytes and len(self._indexes) > 1:
                self._indexes.popitem(last=False)
