"""A rank that wants the store of rank 0 before that listens waits for it, a millisecond at a time.

Left to itself PyTorch tries to connect, is refused, and tries again some hundred milliseconds later. Ranks that are forked,
or stay in their processes, come to this line within milliseconds of each other: about every second restart would wait
so for nothing. Whether somebody listens is asked without connecting: a port that is listened on cannot be bound.
"""

from __future__ import annotations

import functools
import os
import socket
import time

_RENDEZVOUS = "torch.distributed.rendezvous"

_NAP_S = 0.001
#: From then on rank 0 is not just a little late, and PyTorch's own way is as good.
_NAPS = 20_000


def install() -> None:
    """Begins as soon as PyTorch's rendezvous is imported."""
    from mainstay_auto import when_imported

    when_imported(_RENDEZVOUS, _wait_in)


def _wait_in(module) -> None:
    connect = getattr(module, "_create_c10d_store", None)
    if connect is None:
        return

    @functools.wraps(connect)
    def connecting(*arguments, **named):
        # The host, the port and the rank; where PyTorch calls it otherwise one day, nothing is waited for.
        if len(arguments) >= 3 and _is_of_this_host(arguments[0]) and arguments[2] != 0:
            _wait_for(arguments[1])
        return connect(*arguments, **named)

    module._create_c10d_store = connecting


def _is_of_this_host(address) -> bool:
    variables = os.environ
    world = variables.get("WORLD_SIZE")
    return world is not None and world == variables.get("LOCAL_WORLD_SIZE") and address == variables.get("MASTER_ADDR")


def _wait_for(port) -> None:
    for _ in range(_NAPS):
        if _is_listened_on(port):
            return
        time.sleep(_NAP_S)


def _is_listened_on(port) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # With it a port that is only held can be bound as well, as the launcher's.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError, TypeError):
        return True  # or nothing can be learned so, and PyTorch is to try
    return False
