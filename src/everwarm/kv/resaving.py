"""Where the storage may be away for a while: what could not be saved is tried again until it is.

A thread does that, and only while there is something to save. Nobody has to talk to an agent for its last turn to
become safe.
"""

import threading

from everwarm.kv.histories import Histories

FIRST_S = 1.0
MOST_S = 30.0


class Resaving:
    """Tries again."""

    def __init__(self, histories: Histories, first_s: float = FIRST_S) -> None:
        self._histories = histories
        self._first_s = first_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        histories.tell_when_not_saved(self.begin)

    def begin(self) -> None:
        """Something could not be saved."""
        with self._lock:
            self._again = True
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._work, name="everwarm-resave", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        pause = self._first_s
        while not self._ended.wait(pause):
            with self._lock:
                self._again = False
            saved = self._histories.save_idle()
            with self._lock:
                if saved and not self._again:
                    self._thread = None
                    return
            pause = min(MOST_S, 2 * pause)
