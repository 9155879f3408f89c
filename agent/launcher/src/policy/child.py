"""Runs a user's policy for the launcher: `python3 - SOCKET` with this text on standard input, Python 3.9 or later.

Lines of JSON on the socket. First the launcher sends `{"file", "source", "classes", "memory"}` and gets
`{"ready": true}` or `{"broken": TEXT}`; then for each failure `{"ask": N, "case": {...}, "trace": bool}` and gets
`{"answer": N}` with `decision` (or null) or `failed`, and with `lines`, the numbers of the lines that were executed.
"""

import sys

# First: a file in the working directory must not take the place of a module.
sys.path = [path for path in sys.path if path]

import dataclasses
import json
import linecache
import os
import resource
import socket
import threading
import traceback
import types

channel = socket.socket(fileno=int(sys.argv[1]))
# Neither the programs that a policy starts nor its forks hold the socket or answer in its place.
channel.set_inheritable(False)
os.register_at_fork(after_in_child=lambda: os.close(channel.detach()))
lines = channel.makefile("r", encoding="utf-8")


def tell(message):
    channel.sendall((json.dumps(message) + "\n").encode())


def explain(error, file):
    """The error with the innermost line of the policy, and the policy's part of the traceback on standard error."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    name = os.path.basename(file)
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{name}:{error.lineno}:{error.offset}: {error.msg}"
    at = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == file]
    line = f"{name}:{at[-1]}" if at else name
    return f"{line}: {type(error).__name__}: {error}"


def load(file, source, classes):
    module = types.ModuleType("mainstay.policy")
    # The classes of this launcher, also where another version of the package is installed, or none.
    sys.modules["mainstay.policy"] = module
    exec(compile(classes, "mainstay/policy.py", "exec"), module.__dict__)
    sys.path.insert(0, os.path.dirname(file))
    sys.argv = [file]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    policy = types.ModuleType("policy")
    policy.__file__ = file
    sys.modules["policy"] = policy
    exec(compile(source, file, "exec"), policy.__dict__)
    if not callable(getattr(policy, "decide", None)):
        raise TypeError("there is no function decide(case), which is called for each failure")
    return module, policy


def decision_of(returned, classes):
    if returned is None:
        return None
    if not isinstance(returned, classes.Decision):
        what = type(returned).__name__
        raise TypeError(f"decide() returned {what}; it returns a Decision, or None to leave it to the built-in policy")
    return dataclasses.asdict(returned)


def answer(question, classes, policy, file):
    executed = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            executed.add(frame.f_lineno)
        return trace

    reply = {"answer": question["ask"]}
    try:
        case = classes._case(question["case"])
        if question["trace"]:
            sys.settrace(trace)
        try:
            returned = policy.decide(case)
        finally:
            sys.settrace(None)
        reply["decision"] = decision_of(returned, classes)
        json.dumps(reply)
    except BaseException as error:
        reply.pop("decision", None)
        reply["failed"] = explain(error, file)
    return {**reply, "lines": sorted(executed)}


def main():
    plan = json.loads(lines.readline())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = plan["memory"] if hard == resource.RLIM_INFINITY else min(plan["memory"], hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    file = plan["file"]
    try:
        classes, policy = load(file, plan["source"], plan["classes"])
    except BaseException as error:
        return tell({"broken": explain(error, file)})
    tell({"ready": True})
    for line in lines:
        tell(answer(json.loads(line), classes, policy, file))


try:
    main()
finally:
    # The launcher has closed its end, or this is a fork. What a policy does in threads is finished, within the launcher's
    # limit; the rest of an interpreter's end takes time and is not needed.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
