"""``@mainstay.section("name")``: a function whose every call is a section."""

from __future__ import annotations

import functools


def around(section, function):
    """`function` with `section` around each call. Of a coroutine function it covers the call, not what is awaited."""

    @functools.wraps(function)
    def inside(*args, **kwargs):
        with section:
            return function(*args, **kwargs)

    return inside
