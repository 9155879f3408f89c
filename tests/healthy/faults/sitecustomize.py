"""Causes a fault in an unmodified training program: Python imports this module if its directory is in PYTHONPATH.

    FAULT          the name of the fault in `faults.json`
    FAULT_RANK     the rank that fails, in the first attempt only
    FAULT_AFTER    the number of steps before the fault; 0 is before the first one
    FAULT_MARKS    a folder in which `ready`, with the process id, is created if the fault is caused from outside
    FAULT_WARNING  if set, an unrelated warning is printed just before the fault
    FAULT_CLIENT   if set, the program uses Mainstay's client

A step is a call of `Optimizer.step`. Without torch, it is a line that names a step.
"""

import builtins
import os
import re
import sys

_STEP = re.compile(r"\bstep[\"']?[ :=]+(\d+)")
_seen = {"steps": 0, "done": False, "torch": False}


def _is_ours():
    return (
        "FAULT" in os.environ
        and os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0")
        and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    )


def _reached(steps):
    if os.environ.get("FAULT_CLIENT") and steps > 0:
        import mainstay

        mainstay.step(steps)
    if _seen["done"] or not _is_ours() or steps < int(os.environ.get("FAULT_AFTER", 0)):
        return
    _seen["done"] = True
    import fault

    fault.happen(os.environ["FAULT"])


def _on_optimizer(module):
    _seen["torch"] = True

    def stepped(*_):
        _seen["steps"] += 1
        _reached(_seen["steps"])

    module.register_optimizer_step_post_hook(stepped)
    made = module.Optimizer.__init__

    def made_and_reached(self, *arguments, **named):
        made(self, *arguments, **named)
        _reached(0)

    module.Optimizer.__init__ = made_and_reached


class _Finder:
    """Installs the hooks when the module with torch's optimizers is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(_Finder)
        import importlib.util

        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _on_optimizer(module)

        spec.loader.exec_module = exec_module
        return spec


def _watch_lines():
    """Detects steps in the output of programs without torch."""
    show = builtins.print

    def look(text):
        found = None if _seen["torch"] else _STEP.search(text)
        if found:
            _reached(max(1, int(found[1])) if int(os.environ.get("FAULT_AFTER", 0)) else 0)

    def print_and_look(*values, **named):
        show(*values, **named)
        look(" ".join(map(str, values)))

    builtins.print = print_and_look
    import logging

    handle = logging.Logger.callHandlers

    def handle_and_look(self, record):
        handle(self, record)
        look(record.getMessage())

    logging.Logger.callHandlers = handle_and_look


if "FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder)
    _watch_lines()
