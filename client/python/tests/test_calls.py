"""The calls on the training path: what they store in the page, and that they raise for no argument."""

from __future__ import annotations

import math
import re

import pytest
import snapshots


def test_steps_beats_and_sections_read_back(python, page):
    python(
        """
        import mainstay
        assert mainstay.active()
        assert mainstay.status()["active"] and mainstay.status()["refusal"] is None
        with mainstay.section("data"):
            mainstay.beat()
        with mainstay.section("forward"):
            with mainstay.section("attention"):
                pass
        mainstay.step(0, loss=2.5, grad_norm=1, digest=2**64 - 1)
        mainstay.step(1)
        mainstay.section("checkpoint").__enter__()
        import os; os._exit(0)
        """,
        page=page,
    )
    read = page.read()
    assert read["claim"]["state"] == "claimed" and read["claim"]["language"] == "python"
    assert read["identity"] == {"job": "job-1", "rank": 3, "local_rank": 0, "world_size": 4, "attempt": 0}
    first, second = read["records"]
    assert (first["step"], first["loss"], first["grad_norm"], first["digest"]) == (0, 2.5, 1.0, 2**64 - 1)
    assert set(first["sections"]) == {"data", "forward", "attention"}
    assert first["sections"]["forward"] >= first["sections"]["attention"] > 0
    assert (second["step"], second["loss"], second["digest"]) == (1, None, None)
    assert read["beat"]["step"] == 1 and read["beat"]["sections"] == ["checkpoint"]
    assert read["exit_note"] is None


def test_an_orderly_end_closes_the_page(python, page):
    python("import mainstay; mainstay.step(7)", page=page)
    read = page.read()
    assert read["claim"]["state"] == "closed"
    assert read["beat"]["step"] == 7
    assert read["exit_note"] is None or read["exit_note"]["kind"] == "clean"


def test_a_section_may_be_shared_nested_left_by_exception_and_decorate(python, page):
    python(
        """
        import mainstay, threading
        section = mainstay.section("io")
        assert mainstay.section("io") is section and section.name == "io"
        with section as entered:
            assert entered is section
            with section:
                pass
        try:
            with section:
                raise KeyError("passes through")
        except KeyError:
            pass
        @mainstay.section("load")
        def load(a, *, b):
            "reads"
            return a + b
        assert load(1, b=2) == 3 and load.__name__ == "load" and load.__doc__ == "reads"
        threads = [threading.Thread(target=load, args=(1,), kwargs={"b": 2}) for _ in range(8)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        mainstay.step(0)
        """,
        page=page,
    )
    read = page.read()
    assert set(read["records"][0]["sections"]) == {"io", "load"}
    assert read["beat"]["sections"] == []


def test_unlimited_section_names_use_no_memory_and_cause_no_error(python, page):
    python(
        """
        import mainstay
        for n in range(5000):
            with mainstay.section(f"step {n}"):
                pass
        mainstay.step(0)
        with mainstay.section("step 4000"):
            import os
            mainstay.beat()
            assert mainstay.section("step 1") is mainstay.section("step 1")
            assert mainstay.section("step 4999") is not mainstay.section("step 4999")
            os._exit(0)
        """,
        page=page,
    )
    read = page.read()
    assert read["beat"]["sections"] == ["other"]
    assert read["records"][0]["more_sections"]


MEASURES = [
    ("1.5", 1.5),
    ("3", 3.0),
    ("True", 1.0),
    ("float('nan')", math.nan),
    ("float('-inf')", -math.inf),
    ("numpy.float32(0.5)", 0.5),
    ("numpy.float64(0.25)", 0.25),
    ("numpy.int64(4)", 4.0),
    ("numpy.array(2.0)", 2.0),
    ("None", None),
]


@pytest.mark.parametrize(("written", "meant"), MEASURES, ids=[written for written, _ in MEASURES])
def test_what_counts_as_a_measure(python, page, written, meant):
    module = written.split(".")[0]
    needed = module if module == "numpy" else "math"
    pytest.importorskip(needed)
    done = python(f"import mainstay, {needed}; mainstay.step(1, loss={written})", page=page)
    loss = page.read()["records"][0]["loss"]
    assert loss == meant or (math.isnan(meant) and math.isnan(loss))
    assert done.stderr == ""


def test_a_tensor_on_a_device_is_left_out_unread(python, page):
    done = python(
        """
        import mainstay

        class Device:
            type = "cuda"
            def __str__(self): return "cuda:0"

        class Tensor:
            device = Device()
            def read(self, *_): raise SystemExit("the device was waited for")
            __float__ = __index__ = item = read

        for n in range(3):
            mainstay.step(n, loss=Tensor(), grad_norm=Tensor())
        """,
        page=page,
    )
    assert [record["loss"] for record in page.read()["records"]] == [None] * 3
    assert done.stderr.count("RuntimeWarning") == 2
    snapshots.check("calls", "a tensor on a device", snapshots.warned(done.stderr))


def test_which_tensors_of_torch_are_measures(forked, page):
    _, printed = forked("""
        import mainstay, torch
        for step, loss in enumerate((
            torch.tensor(0.5), torch.tensor([0.25], requires_grad=True), torch.tensor(2.0, dtype=torch.bfloat16),
        )):
            mainstay.step(step, loss=loss)
        print("before the meta tensor", flush=True)
        mainstay.step(3, loss=torch.ones((), device="meta"))
    """, page=page)
    assert [record["loss"] for record in page.read()["records"]] == [0.5, 0.25, 2.0, None]
    before, after = printed.split("before the meta tensor\n")
    assert before == ""
    snapshots.check("calls", "a tensor on meta", snapshots.warned(after))


WRONG_CALLS = """
class Hostile:
    def __getattr__(self, name): raise RuntimeError("hostile")
    def __float__(self): raise ValueError("hostile")
    def __index__(self): raise ValueError("hostile")
    def __hash__(self): raise ValueError("hostile")
    def __repr__(self): raise ValueError("hostile")
    __str__ = __repr__

class Text(str):
    def __hash__(self): raise ValueError("hostile")

odd = [None, "x", "\\ud800", b"x", -1, 2**64, 10**5000, 1.5, float("nan"), True, [], {}, object(), Hostile(), Hostile,
       Text("y"), int, lambda: 0]
for value in odd:
    assert mainstay.step(value) is None
    for name in ("loss", "grad_norm", "digest", "step", "nonsense", "\\ud800"):
        assert mainstay.step(1, **{name: value}) is None
        assert mainstay.step(**{name: value}) is None
    assert mainstay.step(1, value, value, loss=value) is None
    assert mainstay.data_at(value) is None and mainstay.data_at(position=value, x=value) is None
    assert mainstay.beat(value) is None and mainstay.beat(x=value) is None
    assert mainstay.active(value, x=value) in (True, False)
    with mainstay.section(value): pass
    with mainstay.section(name=value): pass
    with mainstay.section(value, value, x=value): pass
    section = mainstay.section("x")
    section.__enter__(value, x=value)
    section.__exit__(value, x=value)
    section.__exit__()
    assert mainstay.section("x")(value) is value or callable(value)
mainstay.step(); mainstay.data_at(); mainstay.section(); mainstay.section("x")(); mainstay.section("x")(x=1); mainstay.section("")
"""


@pytest.mark.parametrize("with_page", [True, False], ids=["page", "no page"])
@pytest.mark.parametrize("filters", [(), ("-W", "error")], ids=["warnings", "warnings as errors"])
def test_no_arguments_make_a_call_raise(python, page, with_page, filters):
    code = "import mainstay\n" + WRONG_CALLS + "\nmainstay.step(99)\n"
    done = python(code, *filters, page=page if with_page else None)
    if with_page:
        assert page.read()["beat"]["step"] == 99
        told = re.findall(r"mainstay\.(?:step|beat|section|data_at): [^:\n]*|mainstay\.beat takes", done.stderr)
        assert len(told) == len(set(told)) == 9, done.stderr
    else:
        assert done.stderr == ""


def test_each_kind_of_mistake_is_reported_once_with_its_line(python, page):
    done = python(
        """
        import mainstay
        for n in range(10):
            mainstay.step(n, loss="high")
            mainstay.step(n, los=1.0)
        """,
        page=page,
    )
    assert done.stderr.count("RuntimeWarning") == 2
    assert re.search(r"script-\d+\.py:4: RuntimeWarning: mainstay\.step: loss ", done.stderr)
    snapshots.check("calls", "two mistakes", re.sub(r"(left out): .*", r"\1", snapshots.warned(done.stderr)))
    assert [record["step"] for record in page.read()["records"]] == [n for n in range(10) for _ in range(2)]


def test_a_signal_handlers_exception_is_the_users_and_passes(python, page):
    done = python(
        """
        import mainstay
        class Interrupted:
            def __float__(self): raise KeyboardInterrupt
        try:
            mainstay.step(1, loss=Interrupted())
        except KeyboardInterrupt:
            print("passed")
        """,
        page=page,
    )
    assert done.stdout == "passed\n"


def test_without_a_page_everything_is_a_silent_no_op(python):
    done = python(
        """
        import sys, mainstay
        hook = sys.excepthook
        mainstay.step(1, loss=0.5); mainstay.beat()
        with mainstay.section("x"): pass
        @mainstay.section("y")
        def f(): return 1
        assert f() == 1
        assert not mainstay.active()
        assert mainstay.status() == {"active": False, "page": None, "refusal": None}
        assert sys.excepthook is sys.__excepthook__
        """
    )
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("what", ["missing", "a directory", "text", "empty"])
def test_an_unusable_page_is_refused_with_a_reason_and_without_output(python, tmp_path, what):
    path = tmp_path / "page"
    if what == "a directory":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(b"no page at all\n" * (what == "text") * 20000)
    done = python(
        """
        import mainstay
        mainstay.step(1)
        status = mainstay.status()
        assert not status["active"] and status["page"] in status["refusal"], status
        """,
        MAINSTAY_PAGE=path,
    )
    assert done.stderr == ""


def test_importing_is_light(python):
    done = python(
        """
        import sys
        before = set(sys.modules)
        import mainstay
        print(*sorted(set(sys.modules) - before))
        """
    )
    brought = set(done.stdout.split())
    assert brought <= {
        "mainstay", "mainstay._hooks", "mainstay._native", "mainstay._role", "mainstay._section", "atexit", "__future__",
    }


def test_phases_that_take_long_and_pauses_are_in_the_page(python, page):
    done = python(
        """
        import time, mainstay
        from mainstay import _native
        def quiet():
            # In a child, so that this process keeps its claim.
            code = "import sys; from mainstay import _native; print(_native._testing_read_page(sys.argv[1])['beat']['quiet_until_ns'])"
            import os, subprocess, sys
            out = subprocess.run([sys.executable, "-c", code, os.environ["MAINSTAY_PAGE"]], env={}, capture_output=True, text=True)
            return int(out.stdout)
        now = time.monotonic_ns()
        with mainstay.expect_long("compile", seconds=100):
            mainstay.step(1)
            with mainstay.expect_long("inner", seconds=None):
                pass
            assert now + 100e9 <= quiet() <= time.monotonic_ns() + 100e9
        assert quiet() == 0
        @mainstay.expect_long("download")
        def download():
            mainstay.step(2)
            return quiet()
        assert now + 3600e9 <= download() <= time.monotonic_ns() + 3600e9
        with mainstay.expect_long("for ever", seconds=None):
            assert quiet() == 2**64 - 1
        mainstay.resume()
        mainstay.pause(); mainstay.pause("twice", and_with="arguments")
        assert quiet() == 2**64 - 1
        mainstay.resume()
        assert quiet() == 0
        mainstay.step(3)
        for wrong in (object(), float("nan"), -1, "x"):
            with mainstay.expect_long("wrong", seconds=wrong): pass
        with mainstay.expect_long(7, other=8): pass
        mainstay.pause()
        """,
        page=page,
    )
    assert done.stderr.count("RuntimeWarning") == 1, "a section without a name"
    read = page.read()
    assert [set(record["sections"]) for record in read["records"]][:2] == [{"compile"}, {"compile", "inner", "download"}]
    assert read["beat"]["quiet_until_ns"] == 2**64 - 1


def test_without_a_page_long_phases_do_nothing(python):
    python(
        """
        import mainstay
        with mainstay.expect_long("compile"): mainstay.pause()
        assert mainstay.expect_long("f")(lambda: 7)() == 7
        """
    )


def test_a_rank_reports_its_role(python, page):
    python(
        """
        import mainstay

        mainstay.role("expert", stage=3)
        """,
        page=page,
    )
    claim = page.read()["claim"]
    assert (claim["role"], claim["stage"]) == ("expert", 3)


def test_a_data_position_is_reported_without_a_beat(python, page):
    code = "import mainstay; mainstay.step(1); mainstay.data_at(6); mainstay.data_at(position=7); mainstay.data_at('x')"
    done = python(code, page=page)
    read = page.read()
    assert (read["claim"]["data"], read["beat"]["count"]) == (7, 1)
    snapshots.check("calls", "no position", re.sub(r"(left out): .*", r"\1", snapshots.warned(done.stderr)))


def test_the_number_of_steps_is_reported_without_a_beat(python, page):
    code = "import mainstay; mainstay.step(1); mainstay.total_steps(6); mainstay.total_steps(steps=7); mainstay.total_steps(-1)"
    done = python(code, page=page)
    read = page.read()
    assert (read["claim"]["total_steps"], read["beat"]["count"]) == (7, 1)
    snapshots.check("calls", "no number of steps", re.sub(r"(left out): .*", r"\1", snapshots.warned(done.stderr)))


def test_an_invalid_role_is_left_out_with_a_warning(python, page):
    done = python("import mainstay; mainstay.role('x', stage=-1); mainstay.role(7); mainstay.role(stage='y')", page=page)
    assert done.stderr.count("RuntimeWarning") >= 1
    assert page.read()["claim"]["role"] is None


def test_the_environment_sets_the_role_unless_the_script_does(python, page):
    python("import mainstay", page=page, MAINSTAY_ROLE="actor", MAINSTAY_STAGE="2")
    claim = page.read()["claim"]
    assert (claim["role"], claim["stage"]) == ("actor", 2)


def test_the_stage_that_a_framework_gave_is_found(python, page):
    python(
        """
        import sys, types

        import mainstay
        from mainstay import _role

        state = types.ModuleType("megatron.core.parallel_state")
        state.model_parallel_is_initialized = lambda: True
        state.get_pipeline_model_parallel_world_size = lambda: 4
        state.get_pipeline_model_parallel_rank = lambda: 2
        sys.modules[state.__name__] = state
        _role.from_frameworks()
        """,
        page=page,
    )
    claim = page.read()["claim"]
    assert (claim["role"], claim["stage"]) == ("", 2)
