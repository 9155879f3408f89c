"""Copies from memory to memory through a TCP connection of this machine, once for each byte on standard input.

arguments: MIB  how much

Two processes of low priority, one with sendfile and the other with recv into existing pages: nothing is checked,
hashed or stored, so a replica costs at least that. Writes a line when it is ready; ends with its input.
"""

import mmap
import os
import socket
import sys

SIZE = int(sys.argv[1]) << 20
PIECE = 1 << 20


def send(to):
    source = os.memfd_create("source")
    os.ftruncate(source, SIZE)
    with mmap.mmap(source, SIZE) as pages:
        for at in range(0, SIZE, PIECE):
            pages[at : at + PIECE] = os.urandom(PIECE)
    print("ready", flush=True)
    while os.read(0, 1):
        at = 0
        while at < SIZE:
            at += os.sendfile(to.fileno(), source, at, min(PIECE, SIZE - at))


def receive(connection):
    with mmap.mmap(-1, SIZE) as pages, memoryview(pages) as into:
        for at in range(0, SIZE, mmap.PAGESIZE):
            into[at] = 1
        at = 0
        while got := connection.recv_into(into[at : at + PIECE]):
            at = (at + got) % SIZE


os.nice(10)
listener = socket.create_server(("127.0.0.1", 0))
if os.fork():
    send(socket.create_connection(listener.getsockname()))
else:
    os.close(0)
    connection, _ = listener.accept()
    receive(connection)
