"""``mainstay.roles()`` reads the files that the launchers of the roles replace."""

import json
import os
import threading

import mainstay
import pytest
from mainstay import _roles


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("MAINSTAY_ROLES", str(tmp_path))
    monkeypatch.setattr(_roles, "_names", [])
    monkeypatch.setattr(_roles, "_read", {})

    def write(name, state, incarnation, **more):
        part = tmp_path / f"{name}.part"
        part.write_text(json.dumps({"state": state, "incarnation": incarnation, "since": 5.5, **more}))
        os.replace(part, tmp_path / f"{name}.json")

    return write


def test_each_role_has_a_state_and_an_incarnation(write):
    write("trainer", "RUNNING", 1)
    write("rollout", "ENDED", 3, exit=7)
    assert mainstay.roles() == {
        "rollout": ("rollout", "ENDED", 3, 5.5, 7),
        "trainer": ("trainer", "RUNNING", 1, 5.5, None),
    }


def test_a_file_is_read_again_only_after_it_was_replaced(write, monkeypatch):
    write("rollout", "RUNNING", 1)
    opened = []
    monkeypatch.setattr(_roles, "open", lambda *given: opened.append(given) or open(*given), raising=False)
    for _ in range(3):
        assert mainstay.roles()["rollout"].incarnation == 1
    write("rollout", "STARTING", 2)
    assert mainstay.roles()["rollout"].incarnation == 2
    assert len(opened) == 2


def test_a_rank_waits_for_another_state(write):
    write("rollout", "RUNNING", 1)
    known = mainstay.roles()
    assert mainstay.wait_roles(known, timeout=0) == known
    thread = threading.Timer(0, write, ("rollout", "RECOVERING", 1))
    thread.start()
    assert mainstay.wait_roles(known)["rollout"].state == "RECOVERING"
    thread.join()


def test_a_file_that_cannot_be_read_leaves_the_last_state(write, tmp_path):
    write("rollout", "RUNNING", 1)
    known = mainstay.roles()
    (tmp_path / "part").write_text("{")
    os.replace(tmp_path / "part", tmp_path / "rollout.json")
    assert mainstay.roles() == known
    (tmp_path / "rollout.json").unlink()
    assert mainstay.roles() == known


def test_a_job_without_roles_has_none(monkeypatch):
    monkeypatch.delenv("MAINSTAY_ROLES", raising=False)
    assert mainstay.roles() == {} == mainstay.wait_roles({})
