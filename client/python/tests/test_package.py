"""The package: one wheel for every Python, and stubs that match its content."""

from __future__ import annotations

import ast
import glob
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentences

import mainstay
from mainstay import _native

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


def interpreter(version: str):
    """A Python of that version on this machine, or None."""
    built = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
    for found in [shutil.which(f"python{version}"), *built]:
        # pyenv may have a shim for a version that is not installed.
        asked = found and subprocess.run([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                                         capture_output=True, text=True)
        if asked and asked.stdout.strip() == version:
            return found
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_one_build_serves_every_python(python, page, tmp_path, version):
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    shutil.copytree(Path(mainstay.__file__).parent, tmp_path / "site" / "mainstay")
    done = python(
        """
        import gc, mainstay
        for n in range(1000):
            with mainstay.section("forward"):
                mainstay.beat()
            mainstay.step(n, loss=0.5, grad_norm=2, digest=n)
            mainstay.step("wrong", 1, loss=object())
        gc.collect()
        assert mainstay.checkpoint.save(3, {"a": 1}) and mainstay.checkpoint.load() == {"a": 1}
        raise ValueError("at the end")
        """,
        page=page,
        interpreter=found,
        check=False,
        PYTHONPATH=tmp_path / "site",
        MAINSTAY_CHECKPOINT_DIR=tmp_path / "steps",
    )
    assert "ValueError: at the end" in done.stderr and done.stderr.count("RuntimeWarning") == 3, done.stderr
    read = page.read()
    assert read["beat"]["step"] == 999 and read["beat"]["loss"] == 0.5
    assert (read["exit_note"]["exception"], read["exit_note"]["message"]) == ("ValueError", "at the end")


def test_calls_leak_no_references(python, page):
    python(
        """
        import mainstay, sys
        def calls():
            for n in range(10_000):
                with mainstay.section("forward"):
                    mainstay.beat()
                mainstay.step(10**6 + n, loss=n + 0.5, grad_norm=float(n), digest=2**40 + n)
                mainstay.step(object(), loss="x", other=n)
                mainstay.active()
        calls()
        before = sys.getallocatedblocks()
        calls()
        assert sys.getallocatedblocks() - before < 100
        name = "forward" + str(len(sys.argv))
        section = mainstay.section(name)
        counts = sys.getrefcount(section), sys.getrefcount(name), sys.getrefcount(None)
        for _ in range(1000):
            with mainstay.section(name): pass
        assert (sys.getrefcount(section), sys.getrefcount(name)) == counts[:2]
        assert abs(sys.getrefcount(None) - counts[2]) < 50
        """,
        page=page,
    )


def stub_names(stub: Path) -> set:
    tree = ast.parse(stub.read_text())
    found = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return found


def test_the_stubs_name_what_is_there():
    package = Path(mainstay.__file__).parent
    assert (package / "py.typed").exists()
    native = {name for name in dir(_native) if not name.startswith("__")}
    assert stub_names(package / "_native.pyi") == native
    assert stub_names(package / "__init__.pyi") == {
        "Interrupted", "Round", "_Status", "digest", "expect_long", "on_world_change", "report_digest", "restartable", "role", "rounds", "status",
    }
    for name in mainstay.__all__:
        assert getattr(mainstay, name) is not None
    lists = [node for node in ast.parse((package / "__init__.pyi").read_text()).body if isinstance(node, ast.Assign)]
    stubbed = next(ast.literal_eval(node.value) for node in lists if node.targets[0].id == "__all__")
    assert stubbed == mainstay.__all__


@pytest.mark.parametrize(
    "part, package",
    [("dcp", "torch"), ("jax", "jax"), ("lightning", "torch"), ("torch", "torch"), ("transformers", "torch")],
)
def test_a_part_whose_package_is_missing_says_what_to_install(python, part, package):
    for use in (f"import mainstay; mainstay.{part}", f"import mainstay.{part}"):
        done = python(f"import sys; sys.modules[{package!r}] = None\n{use}", check=False)
        assert "ModuleNotFoundError" in done.stderr and f"{sentences.NEEDS_PACKAGE} {package}," in done.stderr, done.stderr


def test_the_calls_are_native_and_have_signatures():
    assert mainstay.step is _native.step and inspect.isbuiltin(mainstay.step)
    assert str(inspect.signature(mainstay.step)) == "(step, *, loss=None, grad_norm=None, digest=None)"
    assert str(inspect.signature(mainstay.section)) == "(name)"
    assert "Never raises" in mainstay.step.__doc__ and sys.modules["mainstay"].__doc__
