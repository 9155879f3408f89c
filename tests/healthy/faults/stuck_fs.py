"""A FUSE file system, without libfuse, that answers only the INIT request: all other accesses to it hang."""

import ctypes
import os
import struct
import sys

INIT, DESTROY = 26, 38


def main(place):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if ctypes.CDLL(None, use_errno=True).mount(b"stuck", place.encode(), b"fuse", 0, options.encode()) != 0:
        raise SystemExit(f"no FUSE here: errno {ctypes.get_errno()}")
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError:
            return
        _, code, unique = struct.unpack("<IIQ", request[:16])
        if code == INIT:
            answer = struct.pack("<IIIIHHIIHHII24x", 7, 26, 0, 0, 12, 9, 4096, 1, 0, 0, 0, 0)
            os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
        elif code == DESTROY:
            return


if __name__ == "__main__":
    main(sys.argv[1])
