"""The network of hosts with links that can be slow and lossy, as `tc netem` makes them where the kernel has it.

    links.py DEVICE...

makes a TAP device for each host, prints "ready", and forwards Ethernet frames between them until standard
input ends. A line on standard input changes one direction of the link of a host (0: from it, 1: to it):

    HOST DIRECTION DELAY_MS JITTER_MS LOSS_PERCENT KBIT_PER_S

and is answered by "set". A link holds 1,000 frames in each direction, as netem does; more are dropped.
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
LIMIT = 1000
LARGEST = 65_536


class Way:
    """One direction of a link: frames leave it in order."""

    def __init__(self):
        self.waiting = collections.deque()
        self.free = self.last = 0.0
        self.set(0.0, 0.0, 0.0, 1e7)

    def set(self, delay, jitter, loss, kbit):
        self.delay, self.jitter, self.loss, self.rate = delay / 1e3, jitter / 1e3, loss / 100, kbit * 1e3

    def take(self, now, frame):
        if len(self.waiting) >= LIMIT or random.random() < self.loss:
            return
        self.free = max(self.free, now) + len(frame) * 8 / self.rate
        self.last = max(self.last, self.free + max(0.0, random.gauss(self.delay, self.jitter)))
        self.waiting.append((self.last, frame))

    def due(self, now):
        while self.waiting and self.waiting[0][0] <= now:
            yield self.waiting.popleft()[1]


class Link:
    def __init__(self, name):
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        self.ways = self.out, self.back = Way(), Way()


def frames(device):
    while True:
        try:
            yield os.read(device, LARGEST)
        except OSError:
            return  # No frame is left, or the device is down.


def forward(links):
    """Frames from hosts to the middle, and from there to the hosts that they are for."""
    homes = {}
    now = time.monotonic()
    for link in links:
        for frame in link.out.due(now):
            homes[frame[6:12]] = link
            to = homes.get(frame[:6])
            for other in [to] if to else [other for other in links if other is not link]:
                other.back.take(now, frame)
    for link in links:
        for frame in link.back.due(now):
            try:
                os.write(link.device, frame)
            except OSError:
                pass  # The host's device is down.


def until_due(links):
    heads = [way.waiting[0][0] for link in links for way in link.ways if way.waiting]
    return max(0.0, min(heads) - time.monotonic()) if heads else None


def main():
    links = [Link(name) for name in sys.argv[1:]]
    by_device = {link.device: link for link in links}
    print("ready", flush=True)
    while True:
        # Unlike poll, select waits for less than a millisecond.
        for device in select.select([0, *by_device], [], [], until_due(links))[0]:
            if device != 0:
                link = by_device[device]
                for frame in frames(device):
                    link.out.take(time.monotonic(), frame)
            elif line := os.read(0, 4096):
                for one in line.decode().splitlines():
                    host, direction, *values = one.split()
                    links[int(host)].ways[int(direction)].set(*map(float, values))
                    print("set", flush=True)
            else:
                return
        forward(links)


main()
