"""The package: one wheel for every Python, and stubs that match its content."""

from __future__ import annotations

import ast
import glob
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        "Interrupted", "Round", "_Status", "digest", "expect_long", "on_world_change", "report_digest", "restartable", "role", "roles", "rounds", "status",
        "wait_roles",
    }
    for name in mainstay.__all__:
        assert getattr(mainstay, name) is not None
    lists = [node for node in ast.parse((package / "__init__.pyi").read_text()).body if isinstance(node, ast.Assign)]
    stubbed = next(ast.literal_eval(node.value) for node in lists if node.targets[0].id == "__all__")
    assert stubbed == mainstay.__all__


# Every function and class of the package, as a strictly typed script uses it.
TYPED = """
from __future__ import annotations

import mainstay
import mainstay.dcp, mainstay.jax, mainstay.lightning, mainstay.torch, mainstay.transformers
from mainstay.lightning import MainstayCheckpointIO
from mainstay.transformers import MainstayCallback

def train(first: int, steps: int) -> float:
    weights: dict[str, float] = {"weight": 0.0}
    saved = mainstay.checkpoint.load()
    if saved is not None:
        first = saved["step"] + 1
    weights = mainstay.checkpoint.load(into=weights, replicated=True) or weights
    room: bool = mainstay.checkpoint.reserve(weights)
    for number in range(first, steps):
        with mainstay.section("forward"):
            weights["weight"] += 1.0
        mainstay.step(number, loss=weights["weight"])
        if mainstay.checkpoint.due():
            kept: bool = mainstay.checkpoint.save(number, weights, alike="all")
    return weights["weight"]

@mainstay.restartable
def main() -> None:
    mainstay.role("actor", stage=1)
    roles = mainstay.roles()
    if roles["rollout"].incarnation > 1:
        roles = mainstay.wait_roles(roles, timeout=5.0)
    mainstay.torch.process_group("gloo")
    watched: bool = mainstay.torch.watch()
    newest: int | None = mainstay.checkpoint.latest()
    same: float = mainstay.jax.watch_step(train, first=3, loss=lambda result: result)(0, 3)
    callbacks = [MainstayCallback(), mainstay.lightning.MainstayCallback(), *mainstay.lightning.callbacks()]
    plugins = [MainstayCheckpointIO()]
    written, read = mainstay.dcp.Writer(3), mainstay.dcp.Reader()
    step: int | None = read.step
"""

# A line, and the error that a type checker reports for it.
MISTYPED = [
    ("mainstay.checkpoint.load()['step']", "index"),
    ("mainstay.checkpoint.load(into=[1.0]).append('text')", "arg-type"),
    ("mainstay.checkpoint.load('newest')", "call-overload"),
    ("mainstay.lightning.MainstayCallbacks()", "attr-defined"),
    ("mainstay.torch.watch(step=False)", "call-arg"),
    ("mainstay.jax.watch_step(lambda: 3.0).upper()", "attr-defined"),
]


def test_types_are_known_and_mistakes_are_found(tmp_path):
    pytest.importorskip("mypy")
    mistyped = ["import mainstay.jax, mainstay.lightning, mainstay.torch", *(line for line, _ in MISTYPED)]
    for name, text in [("typed", TYPED), ("mistyped", "\n".join(mistyped))]:
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "typed.py", "mistyped.py"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    reported = [line for line in done.stdout.splitlines() if " error: " in line]
    for number, (line, kind) in enumerate(MISTYPED, start=2):
        found = [error for error in reported if error.startswith(f"mistyped.py:{number}:")]
        assert any(error.endswith(f"[{kind}]") for error in found), (line, done.stdout)
        reported = [error for error in reported if error not in found]
    assert not reported, done.stdout + done.stderr


@pytest.mark.parametrize(
    "part, package",
    [("dcp", "torch"), ("jax", "jax"), ("lightning", "torch"), ("torch", "torch"), ("transformers", "torch")],
)
def test_a_part_whose_package_is_missing_says_what_to_install(python, part, package):
    for use in (f"import mainstay; mainstay.{part}", f"import mainstay.{part}"):
        done = python(f"import sys; sys.modules[{package!r}] = None\n{use}", check=False)
        assert re.search(rf"^ModuleNotFoundError: .* {package}, .*{re.escape(sys.executable)}", done.stderr, re.M), done.stderr


def test_the_calls_are_native_and_have_signatures():
    assert mainstay.step is _native.step and inspect.isbuiltin(mainstay.step)
    assert str(inspect.signature(mainstay.step)) == "(step, *, loss=None, grad_norm=None, digest=None)"
    assert str(inspect.signature(mainstay.section)) == "(name)"
    assert "Never raises" in mainstay.step.__doc__ and sys.modules["mainstay"].__doc__


def test_the_programs_of_the_benchmarks_call_what_the_package_has(tmp_path):
    pytest.importorskip("mypy")
    programs = sorted((Path(__file__).parents[3] / "xtask" / "bench").glob("*.py"))
    assert programs
    # One at a time: they are no package, and some have the same names.
    done = [
        subprocess.run(
            [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--check-untyped-defs", "--no-error-summary",
             "--cache-dir", str(tmp_path), str(program)],
            capture_output=True, text=True,
        )
        for program in programs
        if "import mainstay" in program.read_text()
    ]  # fmt: skip
    assert done
    missing = [line for one in done for line in one.stdout.splitlines() if "Module has no attribute" in line]
    assert not missing
