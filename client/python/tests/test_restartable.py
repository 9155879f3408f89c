"""Restartable functions in real processes, with the launcher's socket created by the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

import mainstay


class Desk:
    """The launcher's end of the socket, for one rank."""

    def __init__(self, path):
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(60)
        self._stream = self._lines = None

    def heard(self) -> dict:
        if self._stream is None:
            self._stream, _ = self._listener.accept()
            self._stream.settimeout(60)
            self._lines = self._stream.makefile("r")
        line = self._lines.readline()
        return json.loads(line) if line else {}

    def tell(self, do: str, epoch: int, **more) -> None:
        self._stream.sendall((json.dumps({"do": do, "epoch": epoch, **more}) + "\n").encode())

    def hang_up(self) -> None:
        self._lines.close()
        self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "rounds.sock")


@pytest.fixture
def rank(tmp_path):
    """Starts a script as a rank in round 4."""
    started = []

    def start(code: str, desk: Desk, **variables) -> subprocess.Popen:
        script = tmp_path / "rank.py"
        script.write_text("import os, sys, time\nimport mainstay\n" + textwrap.dedent(code))
        environment = {**os.environ, "MAINSTAY_ROUNDS": desk.path, "MAINSTAY_ATTEMPT": "4", **variables}
        process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(process) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


def test_without_a_launcher_the_function_is_called_once_and_its_exceptions_pass():
    calls = []

    @mainstay.restartable
    def train(value):
        calls.append(value)
        if value < 0:
            raise ValueError("negative")
        return value

    assert train(3) == 3
    with pytest.raises(ValueError, match="negative"):
        train(-1)
    assert calls == [3, -1]
    numbers = []
    for round in mainstay.rounds():
        with round:
            numbers.append(round.number)
    assert numbers == [0]


LOOP = """
def cleanup():
    print("cleaned up in", os.environ["MAINSTAY_ATTEMPT"])
@mainstay.restartable(cleanup=cleanup)
def train():
    if os.environ["MAINSTAY_ATTEMPT"] == "4":
        FIRST
    return os.environ["MAINSTAY_ATTEMPT"], os.environ["MASTER_PORT"]
print(*train())
"""
GO = {"environment": {"MAINSTAY_ATTEMPT": "7", "MASTER_PORT": "123"}}


def test_a_rank_that_is_ordered_to_leave_continues_in_the_new_round(desk, rank):
    process = rank(LOOP.replace("FIRST", "time.sleep(100000)"), desk)
    assert desk.heard() == {"say": "hello", "epoch": 4}
    desk.tell("leave", 3)  # of an earlier round: has no effect
    desk.tell("leave", 4)
    assert desk.heard() == {"say": "ready", "epoch": 4}
    desk.tell("go", 4, environment={"MAINSTAY_ATTEMPT": "nonsense"})  # of the round that the rank has left
    desk.tell("go", 7, **GO)
    assert desk.heard() == {"say": "hello", "epoch": 7}
    assert desk.heard() == {"say": "done", "epoch": 7}
    desk.tell("finished", 7)
    assert end(process) == "cleaned up in 4\n7 123"


def test_a_rank_that_raises_reports_it_and_waits(desk, rank):
    process = rank(LOOP.replace("FIRST", "raise OSError('lost')"), desk)
    assert desk.heard()["say"] == "hello"
    raised = desk.heard()
    assert (raised["say"], raised["epoch"], raised["exception"], raised["message"]) == ("raised", 4, "OSError", "lost")
    assert "in train" in raised["traceback"]
    assert desk.heard()["say"] == "ready"
    desk.tell("go", 7, **GO)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == "cleaned up in 4\n7 123"


def test_a_rank_that_is_done_is_called_back(desk, rank):
    process = rank(LOOP.replace("FIRST", "return 4,"), desk)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("leave", 4)
    assert desk.heard() == {"say": "ready", "epoch": 4}
    desk.tell("go", 7, **GO)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == "cleaned up in 4\n7 123"


def test_an_interruption_that_is_swallowed_is_repeated(desk, rank):
    first = """
        for _ in range(2):
            try:
                while True:
                    time.sleep(0.001)
            except mainstay.Interrupted:
                print("swallowed", flush=True)
    """.strip()
    process = rank(LOOP.replace("        FIRST", "        " + first), desk)
    assert desk.heard()["say"] == "hello"
    desk.tell("leave", 4)
    # The function returned at last, but its round is over.
    assert desk.heard() == {"say": "ready", "epoch": 4}
    desk.tell("go", 7, **GO)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process).startswith("swallowed\nswallowed\n")


def test_abort_hooks_release_unknown_waits_and_a_broken_hook_does_not_stop_the_others(desk, rank):
    # Signals are blocked, so that only the hook, on another thread, ends the wait.
    code = """
    import ctypes, signal, threading
    reader, writer = os.pipe()
    def broken():
        raise OSError("broken")
    def let_go():
        print(threading.current_thread() is threading.main_thread(), flush=True)
        os.write(writer, b"!")
    @mainstay.restartable(abort=[broken, let_go])
    def train():
        if os.environ["MAINSTAY_ATTEMPT"] == "4":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
            time.sleep(100000)
        return os.environ["MAINSTAY_ATTEMPT"]
    print(train())
    """
    process = rank(code, desk)
    assert desk.heard()["say"] == "hello"
    desk.tell("leave", 4)
    assert desk.heard() == {"say": "ready", "epoch": 4}
    desk.tell("go", 7, **GO)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == "False\n7"


def test_a_process_forked_from_the_rank_does_not_speak_for_it(desk, rank):
    code = """
    @mainstay.restartable
    def train():
        child = os.fork()
        if child == 0:
            raise OSError("of the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(train())
    """
    process = rank(code, desk)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 4)
    assert end(process) == "1"


def test_without_its_launcher_a_rank_behaves_as_if_there_were_none(desk, rank):
    process = rank("print(mainstay.restartable(lambda: 5)())", desk)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.hang_up()
    assert end(process) == "5"


def test_an_exit_of_the_program_is_no_failure_of_its_function(desk, rank):
    process = rank("mainstay.restartable(lambda: sys.exit(9))()", desk)
    assert desk.heard()["say"] == "hello"
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_an_interrupted_thread_that_is_not_the_main_one_leaves_too(desk, rank):
    code = """
    import threading
    def train():
        while os.environ["MAINSTAY_ATTEMPT"] == "4":
            time.sleep(0.001)
        print("again in", os.environ["MAINSTAY_ATTEMPT"])
    thread = threading.Thread(target=mainstay.restartable(train))
    thread.start()
    thread.join()
    """
    process = rank(code, desk)
    assert desk.heard()["say"] == "hello"
    desk.tell("leave", 4)
    assert desk.heard()["say"] == "ready"
    desk.tell("go", 7, **GO)
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == "again in 7"


def test_only_the_sockets_of_process_groups_are_shut_down(python):
    pytest.importorskip("torch")
    code = """
    import os, socket
    from mainstay import _collectives_release as release
    def pair():
        listener = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        # Kept only as a descriptor, as in a native library.
        return mine.detach(), theirs
    before = pair()
    release.install()
    import torch.distributed as dist
    store_port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store_port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    after = pair()
    store = dist.distributed_c10d._get_default_store()
    store.set("known", "1")
    release.release()
    try:
        store.get("known")
        print("the store still answers")
    except Exception:
        print("the store is released")
    for number, theirs in (before, after):
        os.write(number, b"alive")
        print(theirs.recv(5).decode())
    release.destroy()
    print(dist.is_initialized())
    """
    assert python(code).stdout.split("\n")[-5:-1] == ["the store is released", "alive", "alive", "False"]


def test_a_checkpoint_of_a_round_that_is_over_is_not_sealed(tmp_path, monkeypatch):
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    class Slow:
        def __reduce__(self):
            # During the write, the rank continues with another round.
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
            return (int, (5,))

    with pytest.warns(RuntimeWarning, match="gone on to attempt 2"):
        assert not mainstay.checkpoint.save(3, Slow())
    assert mainstay.checkpoint.latest() is None
    assert mainstay.checkpoint.save(3, 5)
    assert mainstay.checkpoint.latest() == 3


WORLDS = """
@mainstay.on_world_change
def scaled(old, new):
    print(old, new, flush=True)
mainstay.on_world_change(scaled)
@mainstay.restartable
def train():
    if os.environ["MAINSTAY_ATTEMPT"] == "4":
        raise OSError("lost")
    return os.environ["WORLD_SIZE"]
print("in", train())
"""


@pytest.mark.parametrize(
    "before, told", [({}, ""), ({"MAINSTAY_PREVIOUS_WORLD_SIZE": "8"}, ""), ({"MAINSTAY_PREVIOUS_WORLD_SIZE": "6"}, "6 8\n")]
)
def test_a_change_of_the_world_is_reported_once_before_the_function_runs_in_it(desk, rank, before, told):
    process = rank(WORLDS, desk, WORLD_SIZE="8", **before)
    assert [desk.heard()["say"] for _ in range(3)] == ["hello", "raised", "ready"]
    desk.tell("go", 7, environment={"MAINSTAY_ATTEMPT": "7", "WORLD_SIZE": "4", "MAINSTAY_PREVIOUS_WORLD_SIZE": "8"})
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == f"{told}8 4\nin 4"


def test_an_unchanged_world_is_not_reported(desk, rank):
    process = rank(WORLDS, desk, WORLD_SIZE="8")
    assert [desk.heard()["say"] for _ in range(3)] == ["hello", "raised", "ready"]
    desk.tell("go", 7, environment={"MAINSTAY_ATTEMPT": "7", "WORLD_SIZE": "8"})
    assert [desk.heard()["say"] for _ in range(2)] == ["hello", "done"]
    desk.tell("finished", 7)
    assert end(process) == "in 8"
