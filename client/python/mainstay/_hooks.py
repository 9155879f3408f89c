"""The start and the end of a rank's life: opens its page at import, and leaves a note when an exception ends it.

The note is written by a hook chained into ``sys.excepthook``. Python calls that hook in two situations that look
alike: when an uncaught exception ends the program, and when code prints an exception that was handled (C code
through ``PyErr_Print``, or a script that calls the hook itself). Only the first is the rank's end, and readers of
the page act on the note at once, so the two must be distinguished: at the end of the program the program's own
outermost frame is gone from the stack.
"""

from __future__ import annotations

import atexit
import os
import sys

from . import _native, _role

_PAGE = "MAINSTAY_PAGE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_STACKS = "MAINSTAY_STACKS"
_STACK_SIGNAL = 16  # SIGSTKFLT: the kernel never sends it, and no library is known to use it
_TEMPLATE = "__mainstay_template__"

_owner = 0  # pid of the process that opened the page; a forked child must not write for it
_program = None  # code of the program's outermost frame
_previous = None  # the hook that was there before ours
_noted = False
_stacks = None  # held open for faulthandler, which writes into its descriptor


def start() -> None:
    """Opens the page that the environment names, if this process is the rank, and installs the hooks."""
    global _owner, _program, _previous
    if _owner or not os.environ.get(_PAGE) or _is_multiprocessing_child():
        return
    if not _native.open():
        return
    _owner = os.getpid()
    _program = _outermost_code()
    _previous = sys.excepthook
    sys.excepthook = _excepthook
    atexit.register(_at_exit)
    _attempt(_role.from_environment)
    _attempt(_tell_modules_later)
    _attempt(_show_stacks_when_asked)
    if os.environ.get("MAINSTAY_DRILL"):
        _attempt(_take_part_in_drills)


def program_is(code) -> None:
    """Finds the program's outermost frame if the page was opened before it started to run."""
    global _program
    _program = code


def status() -> dict:
    page = os.environ.get(_PAGE) or None
    refusal = _native.refusal()
    if page and not refusal and not _owner and _is_multiprocessing_child():
        refusal = "this process is a child of the rank, which beats for itself"
    return {"active": _native.active(), "page": page, "refusal": refusal}


def _is_multiprocessing_child() -> bool:
    # A spawned child has imported multiprocessing before anything of the user's; importing it here would cost more
    # than all of mainstay.
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _outermost_code():
    frame = sys._getframe()
    # A rank that was forked from a template has the template's frames below its program's.
    while frame.f_back is not None and _TEMPLATE not in frame.f_back.f_globals:
        frame = frame.f_back
    return frame.f_code


def _tell_modules_later() -> None:
    from . import _modules

    path = os.environ.get(_modules.VARIABLE)
    if path and not os.path.exists(path):
        _native.after_steps(_modules.AFTER_STEPS, lambda: _modules.tell(path))


def _take_part_in_drills() -> None:
    from . import _drill

    _drill.start()


def _show_stacks_when_asked() -> None:
    """Lets the launcher read where this rank is, even if it never releases the interpreter."""
    global _stacks
    import _signal
    import faulthandler

    path = os.environ.get(_STACKS)
    if path and _signal.getsignal(_STACK_SIGNAL) == _signal.SIG_DFL:
        _stacks = open(path, "ab", buffering=0)
        faulthandler.register(_STACK_SIGNAL, file=_stacks, all_threads=True, chain=False)


def _excepthook(kind, value, traceback) -> None:
    ends = _ends_the_rank(value)
    if ends:
        # Before the previous hook: some hooks end the process themselves (MPI's abort).
        _attempt(_write_error_file, kind, value, traceback)
    try:
        _previous(kind, value, traceback)
    finally:
        if ends:
            _attempt(_leave_note, kind, value, traceback)


def _ends_the_rank(value) -> bool:
    try:
        return (
            os.getpid() == _owner
            and not isinstance(value, SystemExit)
            and _in_main_thread()
            and _outermost_code() is not _program
        )
    except Exception:
        return False


def _in_main_thread() -> bool:
    threading = sys.modules.get("threading")
    return threading is None or threading.current_thread() is threading.main_thread()


def _at_exit() -> None:
    if os.getpid() != _owner:
        return
    if not _noted and sys.excepthook is not _excepthook:
        # Another hook replaced ours without calling it; Python keeps the exception that ended the program here.
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if value is not None and not isinstance(value, SystemExit):
            _attempt(_write_error_file, type(value), value, value.__traceback__)
            _attempt(_leave_note, type(value), value, value.__traceback__)
    if not _noted:
        _native.close()


def _leave_note(kind, value, traceback) -> None:
    """Writes the exit note; after it the launcher may end this process at any moment, so all output is flushed first."""
    global _noted
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    _native.exit_note(_full_name(kind), _message(value), _formatted(kind, value, traceback))
    _noted = True


def _write_error_file(kind, value, traceback) -> None:
    """Writes ``TORCHELASTIC_ERROR_FILE`` as PyTorch's ``@record`` does, unless that has already done it."""
    path = os.environ.get(_ERROR_FILE)
    if not path or (os.path.exists(path) and os.path.getsize(path) > 0):
        return
    import json
    import time

    record = {
        "message": {
            "message": f"{kind.__name__}: {_message(value)}",
            "extraInfo": {
                "py_callstack": _formatted(kind, value, traceback),
                "timestamp": str(int(time.time())),
            },
        }
    }
    # Renamed into place: a reader that waits for the file never reads half of it.
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(record, file)
    os.replace(aside, path)


def _full_name(kind) -> str:
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", None) else f"{module}.{kind.__qualname__}"


def _message(value) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__} whose text cannot be read>"


def _formatted(kind, value, traceback) -> str:
    """The traceback as Python prints it, with causes, contexts and the members of exception groups."""
    try:
        import traceback as formatter

        return "".join(formatter.format_exception(kind, value, traceback))
    except Exception:
        # Formatting runs the exception's own code, and needs memory that a MemoryError may not have left.
        return f"{_full_name(kind)}: {_message(value)}\n"


def _attempt(action, *arguments) -> None:
    # Nothing in here may hide the traceback that the user needs.
    try:
        action(*arguments)
    except Exception as error:
        try:
            sys.stderr.write(f"mainstay: {action.__name__.strip('_').replace('_', ' ')} failed: {error}\n")
        except Exception:
            pass
