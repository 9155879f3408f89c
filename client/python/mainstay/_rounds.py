"""The protocol for rounds between a rank and its launcher: a Unix socket next to the heartbeat pages, with one line of
JSON per message.

The launcher tells the rank to leave a round and to start the next; the rank sends its state. Each message carries the
number of its round, so that a late message has no effect. A rank whose launcher is gone behaves as without one.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time

VARIABLE = "MAINSTAY_ROUNDS"
_EPOCH = "MAINSTAY_ATTEMPT"
_LONGEST_TEXT = 60_000


def epoch() -> int:
    """The number of the round that this process is in."""
    text = os.environ.get(_EPOCH, "")
    return int(text) if text.isdecimal() else 0


class Desk:
    """The connection to the launcher. Its thread calls ``on_leave`` when the rank must leave the round."""

    def __init__(self, path: str, on_leave):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(5)
            self._socket.connect(path)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        self._on_leave = on_leave
        self._calls = queue.SimpleQueue()
        self._owner = os.getpid()
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="mainstay-rounds", daemon=True)
        self._thread.start()

    def say(self, what: str, of: int, **more) -> bool:
        """Sends a message; returns whether it was sent. A process forked from the rank sends nothing."""
        if self._owner != os.getpid():
            return False
        line = json.dumps({"say": what, "epoch": of, **more}) + "\n"
        try:
            self._socket.sendall(line.encode("ascii"))
            return self._open
        except OSError:
            return False

    def next(self, wanted: str, of: int):
        """Waits for a message of this kind and of this round, or a later one; None if the launcher is gone."""
        while True:
            call = self._calls.get()
            if call is None:
                self._calls.put(None)
                return None
            if call.get("do") in (wanted, "leave" if wanted == "finished" else wanted) and call.get("epoch", -1) >= of:
                return call

    def close(self) -> None:
        self._open = False
        if self._owner == os.getpid():
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        received = b""
        while True:
            try:
                chunk = self._socket.recv(65536)
            except OSError:
                chunk = b""
            if not chunk:
                self._open = False
                self._calls.put(None)
                return
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                call = json.loads(line)
                self._calls.put(call)
                if call.get("do") == "leave":
                    self._on_leave(call.get("epoch"))


def told_of(error: BaseException) -> dict:
    """Formats an exception for the launcher."""
    from . import _hooks

    kind = type(error)
    return {
        "at": time.monotonic_ns(),
        "exception": _hooks._full_name(kind),
        "message": _hooks._message(error)[:_LONGEST_TEXT],
        "traceback": _hooks._formatted(kind, error, error.__traceback__)[-_LONGEST_TEXT:],
    }
