"""Every change of a checkpoint on disk goes through :func:`do`, one operation at a time.

So tests can end a process between any two operations (``MAINSTAY_TEST_CRASH_AT=N`` ends it before the N-th), and the
operations of a save are easy to find.
"""

from __future__ import annotations

import io
import os
import threading
import time
from typing import Any, Callable, Optional

_crash_at = int(os.environ.get("MAINSTAY_TEST_CRASH_AT") or 0)
_done = 0


def do(operation, *arguments, **named):
    """Runs one operation that changes the disk."""
    global _done
    _done += 1
    if _done == _crash_at:
        os._exit(86)
    return operation(*arguments, **named)


def aside(what: str) -> str:
    """A name that no other process uses, for a temporary file that becomes ``what``. Processes of several hosts and
    containers may write into one directory, and each may have any process id: the name has the place in which this one
    is valid, and when it was made. The launcher and the agent make the same names."""
    return f".{what}.{os.getpid()}-{place()}-{time.time_ns():x}.tmp"


#: How long a file system may take to answer.
_PATIENCE_S = 3.0

_waits: Optional[threading.Thread] = None


class Silent(OSError):
    """A file system that has not answered in time."""


def ask(work: Callable, *arguments: Any) -> Any:
    """The result of work on the files of checkpoints, done in another thread: their file system may not answer, and
    training must not wait for it. Raises :class:`Silent` after 3 s, and at once while an earlier call still waits."""
    global _waits
    if _waits is not None and _waits.is_alive():
        raise Silent("its file system does not answer")
    ended: list = []

    def run() -> None:
        try:
            ended.append((work(*arguments), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, name="mainstay-files", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return work(*arguments)  # No thread can be started, and most file systems answer.
    thread.join(_PATIENCE_S)
    if not ended:
        _waits = thread
        raise Silent(f"its file system has not answered for {_PATIENCE_S:g} s")
    result, error = ended[0]
    if error is not None:
        raise error
    return result


def check_that_it_answers(directory: str) -> None:
    """Raises :class:`Silent` if the file system of a directory does not answer."""
    try:
        ask(os.statvfs, directory)  # Answered by the server of the file system, not from a cache.
    except Silent:
        raise
    except OSError:
        pass  # For example, the directory does not exist yet.


_unknown_place = os.urandom(8).hex()


def place() -> str:
    """Names the kernel and the PID namespace of this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read(8)}{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return _unknown_place


class Writer(io.RawIOBase):
    """A new file, written through :func:`do`. Keeps the first error: a serializer may replace it by its own."""

    def __init__(self, path: str):
        super().__init__()
        self.error = None
        self._file = do(open, path, "xb", buffering=1 << 20)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        try:
            return do(self._file.write, data)
        except OSError as error:
            self.error = self.error or error
            raise

    def seal(self) -> tuple:
        """Syncs the file to the disk; returns (bytes, checksum) of its content."""
        from . import _native

        do(self._file.flush)
        do(os.fsync, self._file.fileno())
        with open(self._file.name, "rb", buffering=0) as written:
            return _native.checksum_file(written.fileno())

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            except OSError as error:
                self.error = self.error or error
        super().close()


def write_file(path: str, content: bytes) -> None:
    """Writes a new small file and syncs it to the disk."""
    with do(open, path, "xb", buffering=0) as file:
        do(file.write, content)
        do(os.fsync, file.fileno())


def sync_directory(path: str) -> None:
    """Syncs the names in a directory to the disk. Without it, a rename may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        do(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Creates a directory and its missing parents, and syncs each name to the disk."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_directory(parent)
    try:
        do(os.mkdir, path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    sync_directory(parent)


def remove_tree(path: str) -> None:
    """Removes a file or directory with all its content. Ignores files that another rank removes at the same time."""
    try:
        entries = list(os.scandir(path))
    except NotADirectoryError:
        entries = None
    except FileNotFoundError:
        return
    try:
        if entries is None:
            do(os.unlink, path)
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                _unlink(entry.path)
        do(os.rmdir, path)
    except FileNotFoundError:
        pass


def _unlink(path: str) -> None:
    try:
        do(os.unlink, path)
    except FileNotFoundError:
        pass
