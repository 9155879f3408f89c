"""The gates of the native module, with which hooks for frameworks enter and leave sections."""

from __future__ import annotations


def sections(page) -> set:
    return {name for record in page.read()["records"] for name in record["sections"]}


def test_a_gate_takes_whatever_a_hook_is_given_and_is_open_until_left_as_often(python, page):
    python("""
        import mainstay
        from mainstay import _native
        enter, leave = _native.gate(mainstay.section("work"))
        assert enter("a", 2, c=None) is None
        enter()
        leave({}, [])
        open = _native._testing_read_page(__import__("os").environ["MAINSTAY_PAGE"])["beat"]["sections"]
        assert open == ["work"], open
        leave()
        leave()
        mainstay.step(1)
    """, page=page)
    assert page.read()["beat"]["sections"] == [] and sections(page) == {"work"}


def test_calls_of_other_threads_do_not_count(python, page):
    python("""
        import mainstay, threading
        from mainstay import _native
        enter, leave = _native.gate(mainstay.section("work"))
        beside = threading.Thread(target=enter)
        beside.start()
        beside.join()
        mainstay.step(1)
    """, page=page)
    assert sections(page) == set()


def test_the_device_is_timed_in_every_fourth_step(python, page):
    python("""
        import mainstay
        from mainstay import _native
        marks = []
        enter, leave = _native.gate(mainstay.section("work"), (lambda: marks.append(step), lambda: marks.append(-step)))
        before, after = _native.optimizer_gates(mainstay.section("optimizer"), look=lambda: step != 8)
        for step in range(1, 18):
            enter()
            leave()
            before(None, (), {})
            after(None, (), {})
        assert marks == [5, -5, 13, -13, 17, -17], marks
        assert _native.optimizer_steps() == 17
    """, page=page)


def test_where_there_is_no_device_it_is_seldom_asked_for(python, page):
    python("""
        import mainstay
        from mainstay import _native
        asked = []
        before, after = _native.optimizer_gates(mainstay.section("optimizer"), look=lambda: asked.append(step))
        for step in range(1, 140):
            before(None)
            after(None)
        assert asked == [4, 68, 132], asked
    """, page=page)


def test_our_errors_do_not_reach_training_and_an_interrupt_does(python, page):
    python("""
        import mainstay
        from mainstay import _native
        raised = []
        def broken(*_):
            raised.append(1)
            raise ValueError("ours")
        def interrupted(*_):
            raise KeyboardInterrupt
        before, after = _native.optimizer_gates(mainstay.section("optimizer"), (broken, broken), broken, lambda: True)
        for _ in range(5):
            before(None)
            after(None)
        assert len(raised) == 7, "five optimizers to follow, both ends of the step that is timed"
        before, after = _native.optimizer_gates(mainstay.section("optimizer"), None, interrupted)
        before(None)
        try: after(None)
        except KeyboardInterrupt: pass
        else: raise SystemExit("a Ctrl-C is lost")
    """, page=page)
