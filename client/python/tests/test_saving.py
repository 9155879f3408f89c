"""Save requests: how and when a rank receives them."""

from __future__ import annotations

import os
import time

# docs/reference/heartbeat-page.md
LISTENS, REQUEST, AT_STEP, BY_NS, DUE = 800, 2688, 2696, 2704, 2712


def ask(page, at_step, seconds=30):
    with open(page.path, "r+b") as file:
        words = (AT_STEP, at_step), (BY_NS, time.monotonic_ns() + int(seconds * 1e9)), (REQUEST, 1)
        for offset, value in words:
            os.pwrite(file.fileno(), value.to_bytes(8, "little"), offset)


def listens(page) -> bool:
    return page.path.read_bytes()[LISTENS] == 1


def test_without_a_request_the_rank_reports_that_it_listens(page, python):
    python("import mainstay; assert not mainstay.save_requested() and mainstay.save_within() is None", page=page)
    assert listens(page)


def test_a_rank_that_never_asks_does_not_listen(page, python):
    python("import mainstay; mainstay.step(1)", page=page)
    assert not listens(page)


def test_a_request_is_true_after_the_step_that_it_names(page, python):
    ask(page, at_step=5 + 1)
    done = python(
        """
        import mainstay
        for step in range(8):
            mainstay.step(step)
            print(mainstay.save_requested(), end=" ")
        assert 0 < mainstay.save_within() <= 30
        """,
        page=page,
    )
    assert done.stdout.split() == ["False"] * 5 + ["True"] * 3


def test_a_function_is_called_once_and_what_it_raises_is_dropped(page, python):
    ask(page, at_step=1 + 1)
    done = python(
        """
        import mainstay
        def save():
            print("saved")
            raise ValueError("no space")
        mainstay.on_save_request(save)
        for step in range(4):
            mainstay.step(step)
        print("goes on")
        """,
        page=page,
    )
    assert done.stdout.split("\n")[:2] == ["saved", "goes on"]


def test_without_a_page_nothing_is_ever_asked(python):
    python("import mainstay; mainstay.on_save_request(print); assert not mainstay.save_requested()")


def tell_due(page, step):
    with open(page.path, "r+b") as file:
        os.pwrite(file.fileno(), (step + 1).to_bytes(8, "little"), DUE)


def test_a_save_is_due_once_after_the_step_that_is_named(page, python):
    tell_due(page, step=3)
    done = python(
        """
        import mainstay
        for step in range(6):
            mainstay.step(step)
            print(mainstay.checkpoint.due(), end=" ")
        """,
        page=page,
    )
    assert done.stdout.split() == ["False"] * 3 + ["True"] + ["False"] * 2
    # A script that only polls does not promise to save before the end.
    assert not listens(page)


def test_a_step_that_is_left_out_does_not_leave_the_save_out(page, python):
    tell_due(page, step=3)
    done = python(
        """
        import mainstay
        for step in range(0, 50, 10):
            mainstay.step(step)
            print(mainstay.checkpoint.due(), end=" ")
        """,
        page=page,
    )
    assert done.stdout.split() == ["False", "True", "False", "False", "False"]


def test_without_a_page_or_a_word_nothing_is_due(page, python):
    python("import mainstay; mainstay.step(1); assert not mainstay.checkpoint.due()")
    python("import mainstay; mainstay.step(1); assert not mainstay.checkpoint.due()", page=page)


def test_a_save_counts_as_checkpointing_and_one_in_another_thread_does_not(page, python, tmp_path):
    done = python(
        f"""
        import threading, mainstay
        from mainstay import _native
        told = []
        class Section:
            def __init__(self, name): self.name = name
            def __enter__(self): told.append(self.name)
            def __exit__(self, *_): pass
        _native.section = Section
        save = lambda step: mainstay.checkpoint.save(step, {{"a": 1}}, directory={str(tmp_path)!r})
        assert save(1)
        print(told)
        thread = threading.Thread(target=save, args=(2,))
        thread.start(); thread.join()
        print(told)
        """,
        page=page,
    )
    assert done.stdout.split("\n")[:2] == ["['checkpoint']"] * 2
