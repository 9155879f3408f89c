"""Makes a heartbeat page in the file that is named, as a launcher does."""

import sys
import time

from mainstay import _native

_native._testing_format_page(sys.argv[1], now=time.monotonic_ns())
