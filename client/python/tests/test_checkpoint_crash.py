"""A rank that dies between any two operations on the disk: no partial step is offered, no whole step is lost.

Each case is a process that ends itself, without clean-up, before its N-th operation, for every possible N.
"""

from __future__ import annotations

import os
import sys

import pytest

from mainstay import _disk, checkpoint

ENDED_BY_US = 86


def save_and_crash_at(operation: int, step: int, state) -> bool:
    """Saves in a separate process that ends before `operation`. True if it did, False if the save completed."""
    child = os.fork()
    if child == 0:
        _disk._done, _disk._crash_at = 0, operation
        os._exit(0 if checkpoint.save(step, state) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, ENDED_BY_US), f"the save failed instead of crashing at operation {operation}"
    return status == ENDED_BY_US


def litter(directory) -> list:
    return [str(each) for each in directory.rglob(".*")]


SCENES = {
    "first save": ([], 10),
    "next save": ([10], 20),
    "save that prunes": ([10, 20], 30),
    "same step again": ([10, 20], 20),
    "only step again": ([10], 10),
}


@pytest.mark.parametrize("serialiser", ["pickle", "torch"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_crash_at_any_operation(tmp_path, monkeypatch, recwarn, scene, serialiser):
    if serialiser == "torch":
        state_of = pytest.importorskip("torch").tensor
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        state_of = list
    before, step = SCENES[scene]
    operation, crashed = 0, True
    while crashed:
        operation += 1
        directory = tmp_path / str(operation)
        monkeypatch.setenv("MAINSTAY_CHECKPOINT_DIR", str(directory))
        for each in before:
            assert checkpoint.save(each, state_of([each]))
        crashed = save_and_crash_at(operation, step, state_of([step, 1]))

        found = checkpoint.latest()
        assert found in {step, *before[-1:], *([None] if not before else [])}, (operation, found)
        if found is not None:
            loaded = [int(each) for each in checkpoint.load()]
            wanted = [[step, 1], [step]] if step in before else [[step, 1]]
            assert loaded in (wanted if found == step else [[found]]), (operation, loaded)
        if not crashed:
            assert found == step and loaded == [step, 1]

        assert checkpoint.save(step + 10, state_of([0])) and checkpoint.latest() == step + 10
        assert checkpoint.save(step + 20, state_of([0])) and checkpoint.latest() == step + 20
        assert litter(directory) == [], operation
        assert len(list(directory.iterdir())) == 2
    assert operation > 10
    assert not recwarn, [str(each.message) for each in recwarn]


def test_a_crash_of_one_rank_of_two_leaves_the_older_step_to_both(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    operation, crashed = 0, True
    while crashed:
        operation += 1
        monkeypatch.setenv("MAINSTAY_CHECKPOINT_DIR", str(tmp_path / str(operation)))
        for step in (10, 20):
            for rank in ("0", "1"):
                monkeypatch.setenv("RANK", rank)
                if (step, rank) == (20, "1"):
                    crashed = save_and_crash_at(operation, step, (step, rank))
                else:
                    assert checkpoint.save(step, (step, rank))
        offered = set()
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            step, saved_by = checkpoint.load()
            assert saved_by == rank and checkpoint.latest() == step
            offered.add(step)
        assert offered in ({10}, {20}) and (crashed or offered == {20})
    assert not recwarn


def test_the_variable_ends_a_real_process(python, tmp_path):
    done = python(
        "import mainstay; mainstay.checkpoint.save(1, 1)", check=False,
        MAINSTAY_CHECKPOINT_DIR=tmp_path / "steps", MAINSTAY_TEST_CRASH_AT=5,
    )
    assert done.returncode == ENDED_BY_US
