"""Measures calls from Python in ns, one line per call: `python bench_calls.py`, with the release wheel installed.

The figures are the minimum and the median of 15 runs of 200,000 calls. They include the cost of the loop, about 10 ns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit

CALLS = 200_000
STATEMENTS = {
    "python.empty_call": "int()",
    "python.beat": "mainstay.beat()",
    "python.step": "mainstay.step(123456)",
    "python.step_loss": "mainstay.step(123456, loss=loss)",
    "python.step_all": "mainstay.step(123456, loss=loss, grad_norm=loss, digest=77)",
    "python.section_pair": "with mainstay.section('checkpoint'): pass",
    "python.section_pair_kept": "with section: pass",
}


def measure(kind: str) -> None:
    import mainstay

    assert mainstay.active() == (kind == "active"), mainstay.status()
    names = {"mainstay": mainstay, "section": mainstay.section("checkpoint"), "loss": 1.5}
    for name, statement in STATEMENTS.items():
        runs = timeit.repeat(statement, globals=names, number=CALLS, repeat=15)
        least, median = (value / CALLS * 1e9 for value in (min(runs), statistics.median(runs)))
        print(f"{name}.{kind}_ns min {least:.1f} median {median:.1f}")


def main() -> None:
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    from mainstay import _native

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        page = os.path.join(directory, "page")
        _native._testing_format_page(page, now=time.monotonic_ns())
        for kind, path in (("active", page), ("inactive", "")):
            environment = {**os.environ, "MAINSTAY_PAGE": path}
            subprocess.run([sys.executable, __file__, kind], env=environment, check=True)


if __name__ == "__main__":
    main()
