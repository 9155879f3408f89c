"""In-process restart: the training function is called again in the same process after it or a peer failed.

    @mainstay.restartable
    def train():
        torch.distributed.init_process_group("gloo")
        ...

    train()

or, if the training is not a separate function:

    for round in mainstay.rounds():
        with round:
            ...

Under ``mainstay run`` an exception of this rank, the loss of a peer or an order of the launcher ends the round on every
rank: collectives are released, process groups are destroyed, ``cleanup`` is called, and the function runs again with
``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` of the new round. Imports, caches and all objects outside
the function are kept. Without ``mainstay run`` the function is simply called.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading

from . import _collectives_release, _hooks, _native, _rounds, _world

#: The interval at which a rank is asked again to leave its function, and the longer one while it unwinds.
_AGAIN_S = 0.25
_PATIENCE_S = 2.0
# From these attempts on, the release also covers sockets of unknown purpose, and then both directions.
_WIDELY_FROM, _BOTH_DIRECTIONS_FROM = 1, 4

_current = None
_OURS = (__file__, _rounds.__file__, _collectives_release.__file__)


class Interrupted(BaseException):
    """Raised in the training function when the round is over. Not an ``Exception``, so that few handlers catch it."""


def restartable(function=None, *, cleanup=None, abort=()):
    """Makes a function restartable: it is called again in its process after a failure of any rank.

    ``cleanup``: called without arguments after the function has ended and before it is called again. If it raises,
    the process ends and the launcher starts another. ``abort``: one or more callables that release anything that the
    function may be blocked in. They are called from another thread while the function runs.
    """
    if function is None:
        return functools.partial(restartable, cleanup=cleanup, abort=abort)

    @functools.wraps(function)
    def call(*arguments, **named):
        result = None
        for round in rounds(cleanup=cleanup, abort=abort):
            with round:
                result = function(*arguments, **named)
        return result

    return call


def rounds(*, cleanup=None, abort=()):
    """Yields one round after another; enter each with ``with``. See :func:`restartable`."""
    global _current
    rank = None
    if _current is None and os.environ.get(_rounds.VARIABLE) and not _hooks._is_multiprocessing_child():
        rank = _Rank.connected(cleanup, (abort,) if callable(abort) else tuple(abort))
    if rank is None:
        yield Round(None, 0)
        return
    _current = rank
    try:
        number = 0
        while True:
            round = Round(rank, number)
            yield round
            if not round.again:
                return
            number += 1
    finally:
        _current = None
        rank.close()


class Round:
    """One call of the training function."""

    def __init__(self, rank, number: int):
        self._rank = rank
        #: The number of earlier calls of the function in this process.
        self.number = number
        self.again = False

    def __enter__(self):
        if self._rank is not None:
            self._rank.enter()
        return self

    def __exit__(self, kind, error, traceback):
        if self._rank is None:
            return False
        self._rank.come_out()  # first: after this call nothing interrupts this thread
        self.again = self._rank.end(error)
        return self.again


class _Rank:
    """The state of this rank across rounds."""

    def __init__(self, cleanup, abort):
        self.inside = False
        self._cleanup, self._abort = cleanup, abort
        self._leaving = self._thrown = self._aborted = False
        self._out = threading.Event()
        self._releasing, self._throwing = threading.Lock(), threading.Lock()
        self._before = {}
        self._thread = threading.get_ident()
        self._signal = None
        self._desk = None
        self._epoch = _rounds.epoch()

    @classmethod
    def connected(cls, cleanup, abort):
        """Connects to the launcher. None if no launcher listens."""
        rank = cls(cleanup, abort)
        try:
            rank._desk = _rounds.Desk(os.environ[_rounds.VARIABLE], rank._leave_asked)
        except OSError:
            return None
        _collectives_release.install()
        rank._take_signal()
        # The existing objects survive all rounds. Without the freeze, each round would scan them for garbage.
        gc.collect()
        gc.freeze()
        return rank

    def close(self) -> None:
        self._desk.close()
        if self._signal is not None:
            signal.signal(self._signal[0], self._signal[1])
        gc.unfreeze()

    def enter(self) -> None:
        self._epoch = _rounds.epoch()
        self._before = _collectives_release.sockets()
        self._out.clear()
        self._leaving = self._thrown = self._aborted = False
        self.inside = True  # before hello: after it, the launcher may order this rank to leave
        self._desk.say("hello", self._epoch)

    def come_out(self) -> None:
        self.inside = False
        if self._signal is not None:
            return
        while True:
            try:
                with self._throwing:
                    # Cancels an exception that is raised but not delivered: it belongs to the round that has ended.
                    _throw(self._thread, None)
                return
            except Interrupted:
                continue

    def end(self, error) -> bool:
        """Handles the end of a call of the function; returns whether to call it again."""
        if error is None and not self._leaving:
            self._out.set()
            if not self._desk.say("done", self._epoch):
                return False
            call = self._desk.next("finished", self._epoch)
            if call is None or call["do"] == "finished":
                return False
        elif not self._leaving:
            if isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
                self._out.set()
                return False
            error.__traceback__ = _without_ours(error.__traceback__)
            if not self._desk.say("raised", self._epoch, **_rounds.told_of(error)):
                self._out.set()
                return False
            _hooks._attempt(_show, error)
        self._out.set()
        self._leave(error)
        if not self._desk.say("ready", self._epoch):
            return False
        call = self._desk.next("go", self._epoch + 1)
        _collectives_release.close()
        if call is None:
            return False
        size = _world.size()
        os.environ.update(call["environment"])
        _world.changed(size)
        _hooks._attempt(_forget_error_file)
        _native.begin_round()
        return True

    def _leave(self, error) -> None:
        """Leaves all collectives and frees the objects of the function."""
        self._release()
        _collectives_release.destroy()
        if self._cleanup is not None:
            self._cleanup()
        # The exception keeps the frames of the function alive, and with them model, loaders and groups.
        _forget(error)
        gc.collect()

    def _release(self, attempt: int = 0) -> None:
        with self._releasing:
            hooks, self._aborted = () if self._aborted else self._abort, True
            for hook in hooks:
                _hooks._attempt(hook)
            since = self._before if attempt >= _WIDELY_FROM else None
            _hooks._attempt(_collectives_release.release, since, attempt >= _BOTH_DIRECTIONS_FROM)

    def _leave_asked(self, of) -> None:
        """Makes the function's thread leave its function, without a time limit. Runs on the desk's thread."""
        if of != self._epoch:
            return
        self._leaving = True
        for attempt in itertools.count():
            if not self.inside:
                return
            self._release(attempt)
            if self.inside:
                self._interrupt()
            # A thread that unwinds may be in a `finally` block and gets more time.
            if self._out.wait(_PATIENCE_S if self._thrown else _AGAIN_S):
                return

    def _take_signal(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in range(signal.SIGRTMIN + 9, signal.SIGRTMAX):
            if signal.getsignal(number) == signal.SIG_DFL:
                self._signal = (number, signal.signal(number, self._signalled))
                return

    def _interrupt(self) -> None:
        if self._signal is not None:
            # A signal also ends a system call in which Python waits; an asynchronous exception does not.
            signal.pthread_kill(self._thread, self._signal[0])
        else:
            with self._throwing:
                # While the thread enters the round, there is nothing to leave yet. It is asked again later.
                frame = sys._current_frames().get(self._thread)
                if self.inside and frame is not None and frame.f_code.co_filename not in _OURS:
                    self._thrown = True
                    _throw(self._thread, Interrupted)

    def _signalled(self, number, frame) -> None:
        # Raised in our own code, the exception would arrive after the round. The thread is asked again until it leaves
        # the function.
        if self.inside and self._leaving and (frame is None or frame.f_code.co_filename not in _OURS):
            self._thrown = True
            raise Interrupted("the round is over: another rank failed, or the launcher said so")


def _throw(thread: int, kind) -> None:
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


def _without_ours(traceback):
    """The traceback from the user's first frame on."""
    own = traceback
    while own is not None and own.tb_frame.f_code.co_filename in _OURS:
        own = own.tb_next
    return own or traceback


def _show(error) -> None:
    kind = type(error)
    sys.stderr.write(_hooks._formatted(kind, error, error.__traceback__))
    sys.stderr.write("mainstay: this rank leaves the round and waits in its process for the next\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _hooks._write_error_file(kind, error, error.__traceback__)


def _forget_error_file() -> None:
    path = os.environ.get(_hooks._ERROR_FILE)
    if path and os.path.exists(path):
        os.remove(path)


def _forget(error) -> None:
    import traceback

    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
