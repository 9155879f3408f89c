"""The states of the roles of this job (``mainstay run --role NAME=N:COMMAND``), as seen on this host.

Each role has a file in ``MAINSTAY_ROLES``, which is replaced when the state changes. A call asks the kernel only whether
the files are still the same, once for each role.
"""

from __future__ import annotations

import json
import os
import time
from typing import NamedTuple, Optional

DIRECTORY = "MAINSTAY_ROLES"

# Seconds between two looks of a rank that waits.
_LOOK_EVERY = 0.05


class RoleState(NamedTuple):
    """A role: ``incarnation`` counts the starts of its ranks, ``since`` is in seconds since 1970."""

    name: str
    state: str
    incarnation: int
    since: float
    exit: Optional[int]


_names: list = []
_read: dict = {}  # by path: the identity of the file, and what it says


def roles() -> dict:
    """The :class:`RoleState` of each role, by name; empty in a job without roles.

    States are those of jobs (``STARTING``, ``RUNNING``, ``RECOVERING``, ``STOPPING``, ``ENDED``) and ``WAITING``: it has
    ended and is started again later. Never raises.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return {}
    if not _names:
        try:
            # All files are there before the first rank starts.
            _names.extend(sorted(name[:-5] for name in os.listdir(directory) if name.endswith(".json")))
        except OSError:
            return {}
    states = (_state(directory, name) for name in _names)
    return {state.name: state for state in states if state is not None}


def wait_roles(known, timeout: Optional[float] = None) -> dict:
    """Waits until a role is in another state than in ``known``, a result of :func:`roles`, and returns the new states.

    Returns the old ones after ``timeout`` seconds, and at once in a job without roles.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        now = roles()
        if now != known or not now:
            return now
        left = _LOOK_EVERY if until is None else until - time.monotonic()
        if left <= 0:
            return now
        time.sleep(min(left, _LOOK_EVERY))


def _state(directory, name):
    path = f"{directory}/{name}.json"
    known = _read.get(path)
    try:
        status = os.stat(path)
        file = (status.st_ino, status.st_mtime_ns)
        if known is None or known[0] != file:
            with open(path, "rb") as opened:
                text = opened.read()
            value = json.loads(text)
            known = (file, RoleState(name, value["state"], value["incarnation"], value["since"], value.get("exit")))
            _read[path] = known
    except (OSError, ValueError, KeyError):
        # The last one that could be read.
        pass
    return known and known[1]
