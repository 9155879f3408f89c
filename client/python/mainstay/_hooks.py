"""Opens the rank's page at import, and leaves an exit note when an exception ends the rank.

A hook chained into ``sys.excepthook`` writes the note. Python calls that hook in two situations that look alike: when
an uncaught exception ends the program, and when code prints an exception that was handled (C code through
``PyErr_Print``, or a script that calls the hook itself). Only the first ends the rank, and readers of the page act on
the note at once, so the two must be distinguished: at the end of the program, its outermost frame is no longer on the
stack.
"""

from __future__ import annotations

import atexit
import os
import sys

from . import _native, _role

_PAGE = "MAINSTAY_PAGE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_STACKS = "MAINSTAY_STACKS"
_STACK_SIGNAL = 16  # SIGSTKFLT: the kernel never sends it, and no known library uses it
_TEMPLATE = "__mainstay_template__"

_owner = 0  # pid of the process that opened the page; a forked child must not write for it
_program = None  # code of the program's outermost frame
_previous = None  # the hook that ours replaced
_noted = False
_stacks = None  # kept open for faulthandler, which writes to its descriptor


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
    """Sets the code of the program's outermost frame, if the page was opened before the program started."""
    global _program
    _program = code


def status() -> dict:
    page = os.environ.get(_PAGE) or None
    refusal = _native.refusal()
    if page and not refusal and not _owner and _is_multiprocessing_child():
        refusal = "this process is a child of the rank, which beats for itself"
    return {"active": _native.active(), "page": page, "refusal": refusal}


def _is_multiprocessing_child() -> bool:
    # A spawned child has imported multiprocessing before any user code. Importing it here would cost more than all of
    # mainstay.
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _outermost_code():
    frame = sys._getframe()
    # In a rank that was forked from a template, the template's frames are below those of the program.
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
    """Lets the launcher read this rank's stacks, even if the rank never releases the interpreter."""
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
        # Before the previous hook, because some hooks end the process (MPI's abort).
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
        # Another hook replaced ours without calling it. Python stores the exception that ended the program in `sys`.
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if value is not None and not isinstance(value, SystemExit):
            _attempt(_write_error_file, type(value), value, value.__traceback__)
            _attempt(_leave_note, type(value), value, value.__traceback__)
    if not _noted:
        _native.close()


def _leave_note(kind, value, traceback) -> None:
    """Writes the exit note. Flushes all output first, because the launcher may end this process after the note."""
    global _noted
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    _native.exit_note(_full_name(kind), _message(value), _formatted(kind, value, traceback))
    _noted = True


def _write_error_file(kind, value, traceback) -> None:
    """Writes ``TORCHELASTIC_ERROR_FILE`` as PyTorch's ``@record`` does, unless it is already written."""
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
    # Renamed into place, so that a reader never sees half of the file.
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
        # Formatting runs code of the exception and allocates memory, which may be impossible after a MemoryError.
        return f"{_full_name(kind)}: {_message(value)}\n"


def _attempt(action, *arguments) -> None:
    # An error here must not hide the traceback that the user needs.
    try:
        action(*arguments)
    except Exception as error:
        try:
            sys.stderr.write(f"mainstay: {action.__name__.strip('_').replace('_', ' ')} failed: {error}\n")
        except Exception:
            pass
