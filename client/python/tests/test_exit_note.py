"""The report of a rank's end: the exit note in the page, and the error file in PyTorch's format."""

from __future__ import annotations

import json
import sys
import time

import pytest


def test_an_uncaught_exception_leaves_type_message_and_traceback(python, page, tmp_path):
    error_file = tmp_path / "error.json"
    done = python(
        """
        import mainstay
        class LossIsNan(ArithmeticError): pass
        def train():
            mainstay.step(41)
            raise LossIsNan("loss is NaN at step 42")
        train()
        """,
        page=page,
        check=False,
        TORCHELASTIC_ERROR_FILE=error_file,
    )
    assert done.returncode == 1
    note = page.note
    assert (note["kind"], note["exception"]) == ("exception", "__main__.LossIsNan")
    assert note["message"] == "loss is NaN at step 42"
    assert note["step"] == 41
    assert note["traceback"] == done.stderr, "the user sees the traceback that Python prints, and nothing else"
    written = json.loads(error_file.read_text())["message"]
    assert written["message"] == "LossIsNan: loss is NaN at step 42"
    assert written["extraInfo"]["py_callstack"] == note["traceback"]
    assert written["extraInfo"]["timestamp"].isdecimal()


def test_causes_and_contexts_are_in_the_traceback(python, page):
    python(
        """
        import mainstay
        try:
            try:
                {}["rank"]
            except KeyError as error:
                raise OSError(5, "reading shard") from error
        except OSError:
            raise RuntimeError("resume failed")
        """,
        page=page,
        check=False,
    )
    note = page.note
    assert note["exception"] == "RuntimeError"
    for part in ("KeyError: 'rank'", "direct cause", "OSError: [Errno 5] reading shard", "During handling"):
        assert part in note["traceback"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup came with Python 3.11")
def test_the_members_of_an_exception_group_are_in_the_traceback(python, page):
    python(
        """
        import mainstay
        raise ExceptionGroup("workers failed", [ValueError("bad batch"), TimeoutError("slow disk")])
        """,
        page=page,
        check=False,
    )
    note = page.note
    assert note["exception"] == "ExceptionGroup" and note["message"].startswith("workers failed")
    assert "ValueError: bad batch" in note["traceback"] and "TimeoutError: slow disk" in note["traceback"]


ENDS = {
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "sys.exit(3)": ("import sys; sys.exit(3)", None),
    "sys.exit('text')": ("import sys; sys.exit('text')", None),
    "return": ("pass", None),
    "handled": ("try: 1/0\nexcept ZeroDivisionError: pass", None),
    "in a thread": ("import threading; t = threading.Thread(target=lambda: 1/0); t.start(); t.join()", None),
    "surrogate": ("raise ValueError('\\ud800')", "ValueError"),
    "unprintable": ("class E(Exception):\n  def __str__(self): raise 1\nraise E", "__main__.E"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "memory": ("raise MemoryError('host memory')", "MemoryError"),
    "huge": ("raise ValueError('x' * 10_000_000)", "ValueError"),
    "syntax": ("exec('1 +')", "SyntaxError"),
}


@pytest.mark.parametrize("end", ENDS)
def test_which_ends_leave_a_note(python, page, tmp_path, end):
    code, exception = ENDS[end]
    error_file = tmp_path / "error.json"
    python(f"import mainstay\n{code}\n", page=page, check=False, TORCHELASTIC_ERROR_FILE=error_file)
    note = page.note
    if exception is None:
        assert note is None or note["kind"] == "clean"
        assert not error_file.exists()
    else:
        assert (note["kind"], note["exception"]) == ("exception", exception)
        name = exception.rpartition(".")[2]
        assert json.loads(error_file.read_text())["message"]["message"].startswith(f"{name}: ")
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".tmp"] == []


def test_the_hook_that_was_there_runs_first_and_the_note_follows(python, page):
    done = python(
        """
        import sys
        def before(kind, value, traceback):
            print("before:", value)
            import mainstay._native
            assert mainstay._native._testing_read_page(__import__("os").environ["MAINSTAY_PAGE"])["exit_note"] is None
        sys.excepthook = before
        import mainstay
        raise ValueError("told once")
        """,
        page=page,
        check=False,
    )
    assert done.stdout == "before: told once\n" and done.stderr == ""
    assert page.note["message"] == "told once"


def test_a_failing_hook_before_ours_hides_no_traceback_or_note(python, page):
    done = python(
        """
        import sys
        def broken(*_): raise TypeError("broken hook")
        sys.excepthook = broken
        import mainstay
        raise ValueError("the real one")
        """,
        page=page,
        check=False,
    )
    assert "broken hook" in done.stderr and "ValueError: the real one" in done.stderr
    assert page.note["message"] == "the real one"


def test_a_hook_after_ours_that_chains_leaves_the_note(python, page):
    python(
        """
        import sys, mainstay
        ours = sys.excepthook
        sys.excepthook = lambda *what: ours(*what)
        raise ValueError("chained")
        """,
        page=page,
        check=False,
    )
    assert page.note["message"] == "chained"


def test_a_hook_after_ours_that_does_not_chain_still_leaves_the_note_at_exit(python, page):
    python(
        """
        import sys, mainstay
        sys.excepthook = lambda *what: None
        raise ValueError("unchained")
        """,
        page=page,
        check=False,
    )
    assert page.note["message"] == "unchained" and "ValueError: unchained" in page.note["traceback"]


def test_printing_a_handled_exception_by_the_hook_is_not_the_end(python, page, tmp_path):
    python(
        """
        import sys, mainstay
        def log():
            try:
                1 / 0
            except ZeroDivisionError:
                sys.excepthook(*sys.exc_info())
        log()
        mainstay.step(5)
        """,
        page=page,
        TORCHELASTIC_ERROR_FILE=tmp_path / "error.json",
    )
    assert page.note is None or page.note["kind"] == "clean"
    assert page.read()["beat"]["step"] == 5
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize("how", ["-m", "-c"])
def test_modules_and_command_lines_leave_notes_too(python, page, tmp_path, how):
    (tmp_path / "trainer.py").write_text("import mainstay\nraise ValueError('as a module')\n")
    command = ["-m", "trainer"] if how == "-m" else ["-c", "import trainer"]
    python(
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, *{command!r}])
        """,
        page=page,
    )
    assert page.note["message"] == "as a module"


def test_output_is_flushed_before_the_note(python, page):
    done = python(
        """
        import sys
        print("last words", end="")
        import mainstay, mainstay._native as native
        real = native.exit_note
        def at_note(*what):
            sys.stdout.write = None
            return real(*what)
        native.exit_note = lambda *what: (real(*what), __import__("os")._exit(9))
        raise ValueError
        """,
        page=page,
        check=False,
    )
    assert done.returncode == 9 and done.stdout == "last words"
    assert page.note is not None


def test_an_error_file_that_is_already_written_stays(python, page, tmp_path):
    error_file = tmp_path / "error.json"
    error_file.write_text("written by another")
    python("import mainstay; raise ValueError", page=page, check=False, TORCHELASTIC_ERROR_FILE=error_file)
    assert error_file.read_text() == "written by another"
    error_file.write_text("")
    fresh = type(page)(tmp_path / "fresh.page")
    python("import mainstay; raise ValueError('x')", page=fresh, check=False, TORCHELASTIC_ERROR_FILE=error_file)
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: x"


def test_an_error_file_that_cannot_be_written_hides_nothing(python, page, tmp_path):
    done = python(
        "import mainstay; raise ValueError('seen')", page=page, check=False,
        TORCHELASTIC_ERROR_FILE=tmp_path / "missing" / "error.json",
    )
    assert "ValueError: seen" in done.stderr and "write error file failed" in done.stderr
    assert page.note["message"] == "seen"


def test_pytorch_reads_the_error_file_and_its_record_comes_first(python, page, tmp_path):
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    python("import mainstay; raise ValueError('for torch')", page=page, check=False, TORCHELASTIC_ERROR_FILE=ours)
    failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(ours))
    assert failure.message["message"] == "ValueError: for torch"
    assert abs(failure.timestamp - time.time()) < 600
    told = str(errors.ChildFailedError("train.py", {0: failure}))
    assert "Traceback (most recent call last)" in told and "ValueError: for torch" in told

    second = type(page)(tmp_path / "second.page")
    python(
        """
        import mainstay
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
        """,
        page=second,
        check=False,
        TORCHELASTIC_ERROR_FILE=theirs,
    )
    assert second.note["message"] == "recorded"
    assert "in main" in json.loads(theirs.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "wrapper" in theirs.read_text() and "line 7, in <module>" not in theirs.read_text()
