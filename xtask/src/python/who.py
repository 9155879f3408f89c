"""Prints an interpreter's version and packages, without importing anything large."""

import importlib.util
import json
import sys


def has(name):
    return importlib.util.find_spec(name) is not None


print(
    json.dumps(
        {
            "version": list(sys.version_info[:3]),
            "prefix": sys.base_prefix,
            "torch": has("torch"),
            "venv": has("venv") and has("ensurepip"),
        }
    )
)
