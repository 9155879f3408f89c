"""Packages that a part of this package needs, and that a program may not have: ``from ._framework import torch``."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax as jax
    import torch as torch
    import transformers as transformers


def imported(name: str):
    """The module ``name``. The error without its package says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if missing.name != package:
            raise
        text = f"this part of mainstay needs the package {package}, which is not installed for {sys.executable}"
        raise ModuleNotFoundError(text, name=package) from None


def __getattr__(name: str):
    if name in ("jax", "torch", "transformers"):
        return imported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
