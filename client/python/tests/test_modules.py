"""The report of a rank's imported modules once it trains."""

from __future__ import annotations

import json

PROGRAM = """
    import colorsys, sys, threading
    import mainstay
    threading.Thread(target=lambda: None).start()
    for step in range({steps}):
        mainstay.step(step)
    """


def test_modules_are_reported_after_some_steps_in_import_order(python, page, tmp_path):
    told = tmp_path / "made" / "modules.json"
    python(PROGRAM.format(steps=7), page=page, MAINSTAY_MODULES=told)
    assert not told.exists()
    page = type(page)(tmp_path / "another.page")
    python(PROGRAM.format(steps=8), page=page, MAINSTAY_MODULES=told)
    held = json.loads(told.read_text())
    names = [name for name, _ in held]
    assert names.index("colorsys") < names.index("threading")
    assert dict(held)["colorsys"].endswith("colorsys.py") and dict(held)["sys"] == ""
    assert "__main__" not in names and not any(name.startswith("mainstay") for name in names)


def test_an_existing_report_is_not_changed(python, page, tmp_path):
    told = tmp_path / "modules.json"
    told.write_text("[]")
    python(PROGRAM.format(steps=20), page=page, MAINSTAY_MODULES=told)
    assert told.read_text() == "[]"


def test_an_unwritable_report_does_not_disturb_training(python, page):
    python(PROGRAM.format(steps=20), page=page, MAINSTAY_MODULES="/proc/no/such/place")
    assert page.read()["beat"]["step"] == 19
