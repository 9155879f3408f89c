"""Faults for drills, in a job that was started with ``--allow-inject``: the launcher requests them on a socket that
exists in such jobs only. Without it this module is never loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time

VARIABLE = "MAINSTAY_DRILL"

#: The period of the slowdown of a slow rank: short compared with a step, long compared with a thread switch.
_MOMENT_S = 0.020
#: The longest single hold: the rank must be slow, not stuck.
_LONGEST_S = 1.0


class InjectedFault(RuntimeError):
    """Caused by a drill."""


def start() -> None:
    """Starts to listen. Must be called on the main thread."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(os.environ[VARIABLE])
    faults = {
        "exception": lambda _: _raise_in(threading.main_thread().ident),
        "hang": _hang_by_signal(),
        "slow": _slow,
        "network": lambda _: _cut(),
    }
    threading.Thread(target=_listen, args=(line, faults), name="mainstay-drill", daemon=True).start()


def _listen(line, faults) -> None:
    received = b""
    while True:
        chunk = line.recv(4096)
        if not chunk:
            return
        *orders, received = (received + chunk).split(b"\n")
        for order in map(json.loads, orders):
            bring_about = faults.get(order.get("fault"))
            if bring_about is not None:
                bring_about(order.get("percent", 0))


def _raise_in(thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(InjectedFault))


def _hang_by_signal():
    """Raises a signal whose handler never returns, on top of the main thread's current code."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN + 9, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stand_still)
            return lambda _: signal.pthread_kill(threading.main_thread().ident, number)
    return lambda _: None


def _stand_still(_number, _frame) -> None:
    while True:
        time.sleep(3600)


def _slow(percent) -> None:
    """Holds the interpreter for a share of the time, so that no other thread runs Python."""
    hold = ctypes.PyDLL(None).usleep
    share = min(percent, 99) / 100

    def go_on():
        while True:
            began = time.monotonic()
            time.sleep(_MOMENT_S * (1 - share))
            # Longer than the sleep: other threads keep the interpreter until they release it and this thread has a
            # processor.
            free = time.monotonic() - began
            hold(int(min(free * share / (1 - share), _LONGEST_S) * 1e6))

    threading.Thread(target=go_on, name="mainstay-slow", daemon=True).start()


def _cut() -> None:
    from . import _collectives_release

    _collectives_release.shut_all()
