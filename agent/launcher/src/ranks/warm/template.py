"""The template: a process that has imported what the ranks need and from which ranks are forked in milliseconds.

`mainstay run` starts it with the interpreter of the user's command; it needs only Python. It reads orders from a socket,
one line of JSON each, and answers the same way. It trains nothing, opens no device and no connection and starts no
thread. After every import it checks for state that a fork would break, and reports it.

There are three generations: the template; a holder, forked from it; and the standbys, forked from the holder, which wait for
their orders. As soon as the launcher knows the standbys the holder ends, so that they become children of the launcher (the
reaper of its descendants), which then sees their ends and statuses as if it had started them itself. That takes the kernel
some milliseconds, so it is done in advance, like everything for which a standby need not know its rank.
"""

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import time
import types

__mainstay_template__ = True  # marks our frames for code that looks for the program's outermost one

# Variables that differ between ranks or attempts. A library that reads them at import has wrong values in a forked rank.
OF_RANKS = frozenset(("RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))

# Libraries that store one of them where _restore_rank_zero can correct it.
KNOWN_READERS = frozenset(
    ("torchmetrics.utilities.prints", "lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero")
)

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main():
    here = sys.modules["__main__"]
    sys.modules["__mainstay_template__"] = here  # keeps our globals when a rank gets a new __main__
    control = Control(int(sys.argv[1]))
    with open(sys.argv[2], encoding="utf-8") as file:
        plan = json.load(file)
    # As the program will see it: imports must find the same files, and libraries may store the arguments.
    sys.argv[:] = ["-m", *plan["arguments"][1:]] if plan["module"] else plan["arguments"]
    if not _safe_path():
        sys.path[0] = plan["path"]
    began = time.monotonic()
    trouble, module, imported = _import_all(plan, control.socket.fileno())
    if trouble:
        control.send({"unclean": {"why": trouble, "module": module}})
        return
    gc.collect()
    gc.freeze()  # keeps common memory pages shared when the ranks collect garbage
    control.send({"warm": {"modules": imported, "seconds": round(time.monotonic() - began, 3)}})
    _serve(control, plan)


def _serve(control, plan):
    standbys = None
    while True:
        order = control.receive()
        if order is None:
            return  # the launcher is gone or needs no more ranks
        if "prepare" in order:
            if standbys is None or len(standbys.pids) < order["prepare"]:
                standbys = Standbys.fork(order["prepare"], control)
            control.send({"prepared": standbys.pids})
        elif "compare" in order:
            control.send({"lacks": _lacking(order["compare"], plan)})
        elif "adopt" in order:
            if standbys is not None:
                standbys.release()
        elif "start" in order:
            ranks = order["start"]
            if standbys is None or len(standbys.pids) < len(ranks):
                standbys = Standbys.fork(len(ranks), control)
            ready, standbys = standbys.divided(len(ranks))
            failed = ready.start(ranks, plan)
            control.send({"failed": failed} if failed else {"started": ready.pids})


class Control:
    """Lines of JSON over an inherited socket."""

    def __init__(self, descriptor):
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(True)
        os.set_inheritable(descriptor, False)
        self.waiting = b""

    def receive(self):
        while b"\n" not in self.waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self.waiting += data
        line, self.waiting = self.waiting.split(b"\n", 1)
        return json.loads(line)

    def send(self, answer):
        self.socket.sendall(json.dumps(answer).encode() + b"\n")


class Standbys:
    """Processes that are forked and wait; each has a socket to us."""

    def __init__(self, pids, sockets, holder, hold):
        self.pids, self.sockets, self.holder, self.hold = pids, sockets, holder, hold

    @staticmethod
    def fork(count, control):
        pairs = [socket.socketpair() for _ in range(count)]
        report, report_end = os.pipe()
        release, hold = os.pipe()
        _flush()
        holder = os.fork()
        if holder == 0:
            _hold(count, pairs, report_end, (report, hold), release, control)
        for _, theirs in pairs:
            theirs.close()
        os.close(report_end)
        os.close(release)
        with os.fdopen(report, encoding="utf-8") as told:
            pids = [int(pid) for pid in told.read().split()]
        return Standbys(pids, [ours for ours, _ in pairs], holder, hold)

    def release(self):
        """Ends the holder: from here on the standbys are the launcher's children."""
        if self.holder is not None:
            os.close(self.hold)
            os.waitpid(self.holder, 0)
            self.holder = None

    def divided(self, count):
        """The first `count` of them, and the rest for later; none if no standby is left."""
        self.release()
        first = Standbys(self.pids[:count], self.sockets[:count], None, None)
        rest = Standbys(self.pids[count:], self.sockets[count:], None, None)
        return first, rest if rest.pids else None

    def start(self, ranks, plan):
        """Sends each its orders; returns the error, or None."""
        try:
            for ours, rank in zip(self.sockets, ranks):
                ours.sendall(json.dumps({"rank": rank, "plan": plan}).encode() + b"\n")
            for ours in self.sockets:
                ours.settimeout(5)
                answer = ours.recv(4096)
                if answer != b"ok":
                    return answer.decode(errors="replace") or "a standby ended before it began"
        except OSError as error:
            return f"a standby cannot be reached: {error}"
        finally:
            for ours in self.sockets:
                ours.close()
        return None


def _hold(count, pairs, report, not_ours, release, control):
    """Runs the holder: forks the standbys, waits to be released, ends."""
    _die_with_parent()
    for descriptor in not_ours:
        os.close(descriptor)
    control.socket.close()
    pids = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.close(report)
            mine = pairs[index][1]
            for number, (ours, theirs) in enumerate(pairs):
                ours.close()
                if number != index:
                    theirs.close()
            os.setpgid(0, 0)
            _stand_by(mine)  # runs the program and does not return
        try:
            os.setpgid(pid, pid)  # also done by the child: whichever is first
        except OSError:
            pass
        pids.append(pid)
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    os.write(report, " ".join(map(str, pids)).encode())
    os.close(report)
    os.read(release, 1)
    os._exit(0)


def _stand_by(mine):
    _get_ready()
    line = b""
    while not line.endswith(b"\n"):
        data = mine.recv(1 << 16)
        if not data:
            os._exit(0)  # no longer needed
        line += data
    orders = json.loads(line)
    rank, plan = orders["rank"], orders["plan"]
    try:
        _become(rank)
    except BaseException as error:
        mine.sendall(f"a standby could not become rank {rank.get('name')}: {error!r}".encode())
        os._exit(1)
    mine.sendall(b"ok")
    mine.close()
    _run(plan, rank["arguments"])


def _get_ready():
    """Does the slow work that does not depend on the rank."""
    ctypes.CDLL(None)
    # random reseeds itself after a fork. The global generators of numpy and torch do not: all ranks would draw the same
    # numbers, while ranks of a plain start draw different ones.
    for module, name in (("numpy.random", "seed"), ("torch", "default_generator.seed")):
        seed = sys.modules.get(module)
        for part in name.split("."):
            seed = getattr(seed, part, None)
        if seed is not None:
            seed()
    compile("", "<nothing>", "exec")


def _become(rank):
    """Sets up the process as a plain start would."""
    _die_with_parent()
    if os.getppid() != rank["launcher"]:
        raise ChildProcessError("the launcher is gone")
    if rank["cgroup"]:
        try:
            with open(rank["cgroup"], "w") as procs:
                procs.write("0")
        except OSError:
            pass  # it then runs outside, as in a plain start
    if rank.get("cpus"):
        try:
            os.sched_setaffinity(0, rank["cpus"])
        except OSError:
            pass  # it then runs on all allowed CPUs, as in a plain start
    for path, descriptor in ((rank["stdout"], 1), (rank["stderr"], 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    for name in rank["unset"]:
        os.environ.pop(name, None)
    os.environ.update(rank["environment"])
    _restore_blas_threads()
    _restore_rank_zero()


def _run(plan, arguments):
    """Runs the user's program as the interpreter itself does, including the frames of its tracebacks."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    target = plan["target"]
    sys.argv[:] = arguments
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = plan["original"]
    try:
        if plan["module"]:
            import runpy

            sys.argv[:] = ["-m", *arguments[1:]]
            _watch_torch(runpy._run_module_as_main.__code__)
            runpy._run_module_as_main(target)
        else:
            program = _script(os.path.abspath(target), main)
            _watch_torch(program)
            exec(program, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _uncaught(error)
    # Not os._exit: threads are joined and exit handlers run as at the end of any program.
    raise SystemExit(0)


def _watch_torch(program):
    """Does what the client's .pth file does in a plain start; there torch is imported later."""
    try:
        import mainstay_auto
    except ImportError:
        return
    mainstay_auto.start(program)


def _script(path, main):
    from importlib.machinery import SourceFileLoader

    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __spec__=None)
    return compile(source, path, "exec", dont_inherit=True)


def _uncaught(error):
    """Handles an uncaught exception as the interpreter does."""
    traceback = error.__traceback__
    while traceback is not None and "__mainstay_template__" in traceback.tb_frame.f_globals:
        traceback = traceback.tb_next
    error = error.with_traceback(traceback)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, traceback)
    except SystemExit:
        raise
    except BaseException as broken:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, traceback)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter then ends itself by SIGINT, for the shell; the exception is already printed.
        sys.excepthook = lambda *_: None
        raise error
    raise SystemExit(1)


def _import_all(plan, control):
    """Imports the modules of the plan in order. Returns (trouble, module, number of imports)."""
    places = _library_places()
    imported = 0
    os.environ.__class__ = _WatchedEnvironment
    for name, origin in _named_in(plan) if plan["imports"] is None else plan["imports"]:
        if name in sys.modules or name in plan["without"] or not _is_library(origin, places):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except BaseException:
            continue  # the program itself may hit the same error
        trouble = _not_forkable(control) or _WatchedEnvironment.trouble
        if trouble:
            return trouble, name, imported
    os.environ.__class__ = os._Environ
    return _not_forkable(control, thorough=True), None, imported


class _WatchedEnvironment(os._Environ):
    """Notes which module reads its rank during import: all ranks that are forked later would have the value that it read."""

    trouble = None

    def __getitem__(self, name):
        if name in OF_RANKS:
            reader = self._importing()
            if reader not in KNOWN_READERS and reader is not None:
                _WatchedEnvironment.trouble = f"{reader} reads {name} when it is imported"
        return super().__getitem__(name)

    @staticmethod
    def _importing():
        """The innermost module whose code runs."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "<module>" and "__mainstay_template__" not in frame.f_globals:
                return frame.f_globals.get("__name__")
            frame = frame.f_back
        return None


def _lacking(path, plan):
    """The number of a rank's modules that could be imported here and are not."""
    try:
        with open(path, encoding="utf-8") as file:
            modules = json.load(file)
    except (OSError, ValueError):
        return 0
    places = _library_places()
    held = [name for name, origin in modules if _is_library(origin, places) and name not in plan["without"]]
    return sum(name not in sys.modules for name in held)


def _named_in(plan):
    """The packages that the text of the program imports, for a program whose ranks have not reported their modules. Imports under
    a condition or after an error are left out: the program may not need them."""
    import ast
    from importlib.util import find_spec

    try:
        path = find_spec(plan["target"]).origin if plan["module"] else plan["target"]
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except Exception:
        return []  # the program itself hits the same error
    names = {}
    for node in _unconditional(tree):
        if isinstance(node, ast.Import):
            names.update((alias.name.split(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names[node.module.split(".")[0]] = None
    found = []
    for name in names:
        try:
            spec = find_spec(name)
        except Exception:
            continue
        if spec is not None and name != "mainstay":
            origin = spec.origin if spec.origin not in (None, "built-in", "frozen") else ""
            found.append((name, origin))
    return found


def _unconditional(tree):
    import ast

    waiting = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If):
            inner = node.body if "__name__" in ast.dump(node.test) else []
        elif isinstance(node, (ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = node.body
        else:
            inner = []
        waiting.extend(reversed(inner))


def _library_places():
    import site
    import sysconfig

    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.update(getattr(site, "getsitepackages", list)())
    user = getattr(site, "getusersitepackages", lambda: None)()
    places.update([user] if user else [])
    places.update(path for path in sys.path if _is_installed_into(path))
    return tuple(os.path.realpath(place) + os.sep for place in places if place)


def _is_installed_into(path):
    """Environments that a .pth file adds to others, and folders of `pip install --target`, are libraries too. An editable
    install is none: its folder is on the path, its record is in the environment."""
    try:
        return bool(path) and any(name.endswith(".dist-info") for name in os.listdir(path))
    except OSError:
        return False


def _is_library(origin, places):
    """The program's own modules are left to the program: they may read their rank, and be edited between attempts."""
    return not origin or os.path.realpath(origin).startswith(places)


def _not_forkable(control, thorough=False):
    """Why a fork of this process would not work; None if it would."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        threads = next((int(line.split()[1]) for line in status if line.startswith("Threads:")), 1)
    if threads != 1:
        return f"it has started {threads - 1} thread(s)"
    if not thorough:
        return None
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
            if children.read().strip():
                return "it has started processes"
    except OSError:
        pass  # a kernel without the list
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("socket:") and int(descriptor) != control:
            return "it has opened a socket"
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio", "/dev/infiniband")):
            return f"it has opened {target}"
    return None


def _restore_blas_threads():
    """Gives ranks their OpenBLAS threads, which it starts when it is loaded; the template had to prevent that."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1" or "MAINSTAY_BLAS" not in os.environ:
        return
    del os.environ["OPENBLAS_NUM_THREADS"], os.environ["MAINSTAY_BLAS"]
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    count = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0))
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        libraries = {line.split(maxsplit=5)[-1].strip() for line in maps if "openblas" in line}
    if count == 1:
        return
    for path in libraries:
        library = ctypes.CDLL(path)
        for symbol in (
            "openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_",
        ):
            if hasattr(library, symbol):
                getattr(library, symbol)(count)


def _restore_rank_zero():
    """Sets the values that KNOWN_READERS store to those of a plain start."""
    for name in KNOWN_READERS.intersection(sys.modules):
        module = sys.modules[name]
        rank = module._get_rank() if hasattr(module, "_get_rank") else int(os.environ.get("LOCAL_RANK", 0))
        module.rank_zero_only.rank = rank or 0


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _safe_path():
    return getattr(sys.flags, "safe_path", False) or sys.flags.isolated


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


if __name__ == "__main__":
    main()
