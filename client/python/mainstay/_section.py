"""``@mainstay.section("name")``, which makes each call of a function a section, and ``mainstay.expect_long``."""

from __future__ import annotations

from . import _native


def around(section, function):
    """`function` with `section` around each call. For a coroutine function it covers the call, not the awaiting."""

    import functools  # here: importing mainstay must cost next to nothing

    @functools.wraps(function)
    def inside(*args, **kwargs):
        with section:
            return function(*args, **kwargs)

    return inside


class expect_long:
    """A section that takes long, such as a compilation: the job is expected to make no progress during it, for at most
    this many seconds (None: without limit). A context manager and decorator. Never raises."""

    def __init__(self, what, *, seconds=3600.0, **_others):
        self._section = _native.section(what)
        try:
            self._seconds = None if seconds is None else float(seconds)
        except Exception:
            self._seconds = 3600.0

    def __enter__(self):
        _native.begin_long(self._seconds)
        self._section.__enter__()
        return self

    def __exit__(self, *exception):
        self._section.__exit__(*exception)
        _native.end_long()

    def __call__(self, function=None, *_others):
        return around(self, function) if callable(function) else self
