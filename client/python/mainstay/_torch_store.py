"""Waits until rank 0's store listens, polling at millisecond intervals, before a rank connects to it.

By default PyTorch tries to connect, is refused, and retries some hundred milliseconds later. Ranks that are forked or
stay in their processes connect within milliseconds of each other, so about every second restart would wait
needlessly, and nearly every one with several hosts. On rank 0's host the check needs no connection: a port with a
listener cannot be bound. From another host it opens a connection and closes it at once.
"""

from __future__ import annotations

import functools
import os
import socket
import time

_RENDEZVOUS = "torch.distributed.rendezvous"

_NAP_S = 0.001
#: After this many polls rank 0 is more than a little late, and PyTorch's own retry is as good.
_NAPS = 20_000

#: From another host: the first interval, and the one after :data:`_EAGER_NAPS` refusals.
_FAR_NAPS_S = (0.003, 0.02)
_EAGER_NAPS = 300
_FAR_NAPS = 1_200
#: The minimum interval per rank: all ranks together poll rank 0's host at most 10,000 times a second.
_FAR_NAP_PER_RANK_S = 0.0001
#: In a job so large that each rank would poll more rarely than this, PyTorch's own retry is better.
_LONGEST_NAP_S = 0.2
_CONNECT_S = 1.0


def install() -> None:
    """Starts as soon as PyTorch's rendezvous is imported."""
    from mainstay_auto import when_imported

    when_imported(_RENDEZVOUS, _wait_in)


def _wait_in(module) -> None:
    connect = getattr(module, "_create_c10d_store", None)
    if connect is None:
        return

    @functools.wraps(connect)
    def connecting(*arguments, **named):
        # The arguments are host, port and rank. If a later PyTorch passes others, this does not wait.
        if len(arguments) >= 3 and arguments[2] != 0 and arguments[0] == os.environ.get("MASTER_ADDR"):
            _wait(arguments[0], arguments[1])
        return connect(*arguments, **named)

    module._create_c10d_store = connecting


def _wait(address, port) -> None:
    world, local = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or local is None:
        return
    if world == local:
        _wait_for(port)
    elif "MAINSTAY_ATTEMPT" in os.environ and world.isdecimal():
        _wait_for_other_host(address, port, int(world))


def _wait_for(port) -> None:
    for _ in range(_NAPS):
        if _is_listened_on(port):
            return
        time.sleep(_NAP_S)


def _is_listened_on(port) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # With this option, a port that is only reserved, for example by the launcher, can be bound.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError, TypeError):
        return True  # someone listens, or the check is impossible and PyTorch must try
    return False


def _wait_for_other_host(address, port, world: int) -> None:
    least = world * _FAR_NAP_PER_RANK_S
    if least > _LONGEST_NAP_S:
        return
    for turn in range(_FAR_NAPS):
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return
        except ConnectionRefusedError:
            time.sleep(max(least, _FAR_NAPS_S[turn >= _EAGER_NAPS]))
        except (OSError, OverflowError, TypeError):
            return  # the name or the route does not work: PyTorch reports it better
