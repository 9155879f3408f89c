"""Watches a rank's PyTorch without a line of code: a ``.pth`` file next to this one calls :func:`start` if the
environment names a heartbeat page.

Outside the package ``mainstay``, because importing that opens the page: a Python program that never imports torch
may not be the rank.
"""

from __future__ import annotations

import os
import sys

_waiting = {}
_started = False


def start(program=None) -> None:
    """Imports ``mainstay.torch`` after torch, and adds Mainstay's callback to each of transformers' trainers, so that
    the steps are their ``global_step``. ``MAINSTAY_TORCH=0`` turns that off.

    ``program``: the code of the program's outermost frame, if it does not run yet but torch may be imported already.
    """
    global _started
    if _started or os.environ.get("MAINSTAY_TORCH", "").strip().lower() in ("0", "false", "no", "off", "n", "f") or not os.environ.get("MAINSTAY_PAGE"):
        return
    _started = True
    when_imported("torch", lambda _torch: _watch(program))
    when_imported("transformers.trainer", _watch_trainers)


def _watch(program) -> None:
    import mainstay.torch

    if program is not None:
        from mainstay import _hooks

        _hooks.program_is(program)
    mainstay.torch.watch()


def _watch_trainers(module) -> None:
    import mainstay.transformers

    mainstay.transformers.watch_all(module)


def when_imported(name: str, action) -> None:
    """Calls ``action(module)`` now if the module is imported, else right after its import. Its errors are dropped."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _attempt(action, module)
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder)
    _waiting.setdefault(name, []).append(action)


class _Finder:
    """Asks the other finders, and handles only the modules that are waited for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is _Finder:
                continue
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None


class _Loader:
    """The loader that was found; after it has run, the actions that wait for the module run too."""

    def __init__(self, loader, name: str):
        self._loader = loader
        self._name = name

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        # Restores the module's own loader for code that looks at it.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in _waiting.pop(self._name, ()):
            _attempt(action, module)
        if not _waiting and _Finder in sys.meta_path:
            sys.meta_path.remove(_Finder)

    def __getattr__(self, name):
        return getattr(self._loader, name)


def _attempt(action, module) -> None:
    try:
        action(module)
    except Exception as error:
        import warnings

        try:
            warnings.warn(f"mainstay: {module.__name__} is not watched: {error!r}", RuntimeWarning, stacklevel=2)
        except Exception:
            pass
