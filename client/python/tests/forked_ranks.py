"""Starts ranks by forking a process that has imported PyTorch: on two processors the import takes most of a short test.

Run as a program, it is that process. Each line of its standard input is one request in JSON; it answers each with a line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import types


def free_port() -> int:
    """A port for the rendezvous of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ForkedRanks:
    """A process that forks the ranks; it ends with `close`."""

    def __init__(self, modules: list[str]):
        self.server = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, script: str, environments: list[dict[str, str]], output: str, timeout: int) -> list[int]:
        """Runs the script once for each environment, with its output in files `OUTPUT.N`. Returns the exit statuses, -N for
        signal N. All ranks are killed after `timeout` seconds."""
        request = {"script": script, "environments": environments, "output": output, "timeout": timeout}
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()


def _rank(script: str, environment: dict[str, str], output: str) -> None:
    """The child: becomes a process like `python SCRIPT` with this environment. Does not return."""
    status = 1
    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(source, target)
        signal.alarm(0)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [script]
        try:
            with open(script) as source:
                program = compile(source.read(), script, "exec")
            _run(program, script)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(program: types.CodeType, script: str) -> None:
    """Runs the program as the interpreter does, watched as a rank of a warm start is."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    import mainstay_auto

    mainstay_auto.start(program)
    exec(program, main.__dict__)


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        ranks = []
        for number, environment in enumerate(request["environments"]):
            pid = os.fork()
            if pid == 0:
                _rank(request["script"], environment, f"{request['output']}.{number}")
            ranks.append(pid)

        def kill(*_, ranks=ranks):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)

        signal.signal(signal.SIGALRM, kill)
        signal.alarm(request["timeout"])
        ends = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        signal.alarm(0)
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        __import__(module)
    _serve()
