"""Reports the modules that a rank has imported once it trains. The launcher restarts ranks with all of them already
imported."""

from __future__ import annotations

import os
import sys

VARIABLE = "MAINSTAY_MODULES"

#: By then, the lazy imports of optimizers, compilers and data loaders are done.
AFTER_STEPS = 8


def tell(path: str) -> None:
    """Writes names and files of all modules, in the order of their import, as JSON."""
    import json

    held = []
    for name, module in list(sys.modules.items()):
        if module is None or name in ("__main__", "__mp_main__") or name.split(".", 1)[0] in ("mainstay", "mainstay_auto"):
            continue
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None) or getattr(module, "__file__", None)
        if not isinstance(origin, str) or origin in ("built-in", "frozen"):
            origin = ""
        held.append((name, origin))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Renamed into place, so that a reader never sees half of the file.
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(held, file)
    os.replace(aside, path)
