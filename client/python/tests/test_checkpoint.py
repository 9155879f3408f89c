"""Local checkpoints: every offered step is whole and exact, and no error stops training or loses a step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import snapshots

from mainstay import _disk, _seal, checkpoint


@pytest.fixture
def directory(tmp_path, monkeypatch):
    path = tmp_path / "steps"
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DIR", str(path))
    monkeypatch.setenv("MAINSTAY_JOB_ID", "job-1")
    return path


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank: int, world_size: int, attempt: int = 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))

    return become


@pytest.fixture(autouse=True)
def no_surprises():
    """A warning that a test does not expect is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield


def names(directory) -> list:
    return sorted(each.name for each in directory.iterdir())


def state_file(directory, step: int, rank: int = 0):
    shard = directory / f"step-{step:012d}" / f"rank-{rank:05d}"
    (file,) = [each for each in shard.iterdir() if each.name != "manifest.json"]
    return file


def told(recorded) -> str:
    return "\n".join(str(each.message) for each in recorded)


def test_a_saved_state_is_loaded_unchanged(directory, recwarn):
    assert checkpoint.latest() is None and checkpoint.load() is None
    state = {"step": 10, "weights": [1.5, float("inf")], "rng": os.urandom(64)}
    assert checkpoint.save(10, state) is True
    assert checkpoint.latest() == 10
    assert checkpoint.load() == state and checkpoint.load(10) == state
    assert names(directory) == ["step-000000000010"]
    manifest = json.loads((directory / "step-000000000010/rank-00000/manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["job"] == "job-1" and manifest["attempt"] == 0
    assert (manifest["step"], manifest["rank"], manifest["world_size"]) == (10, 0, 1)
    (name, sealed), = manifest["files"].items()
    assert sealed["size"] == (directory / "step-000000000010/rank-00000" / name).stat().st_size
    assert not recwarn


def test_directory_may_be_given_and_the_module_is_there_by_attribute(python, tmp_path):
    python(
        f"""
        import sys, mainstay
        assert "mainstay.checkpoint" not in sys.modules
        assert mainstay.checkpoint.save(3, [1], directory={str(tmp_path)!r})
        assert mainstay.checkpoint.latest(directory={str(tmp_path)!r}) == 3
        assert mainstay.checkpoint.load(directory={str(tmp_path)!r}) == [1]
        assert "torch" not in sys.modules
        try:
            mainstay.nothing
        except AttributeError:
            pass
        """
    )


def test_state_of_torch_is_restored_bit_for_bit(forked, directory):
    script = """
        import random, sys, torch, mainstay.checkpoint as checkpoint
        def fresh():
            torch.manual_seed(1); random.seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)
        def train(model, optimiser, steps):
            for _ in range(steps):
                optimiser.zero_grad()
                loss = model(torch.randn(4, 8) * random.random()).square().mean()
                loss.backward(); optimiser.step()
            return loss.item().hex()
        model, optimiser = fresh()
        train(model, optimiser, 5)
        assert checkpoint.save(5, {"model": model.state_dict(), "optimiser": optimiser.state_dict(),
                                   "torch": torch.get_rng_state(), "random": random.getstate()})
        print(train(model, optimiser, 5))
    """
    _, undisturbed = forked(script, MAINSTAY_CHECKPOINT_DIR=directory)
    _, resumed = forked(
        script.split("train(model, optimiser, 5)\n        assert")[0]
        + """saved = checkpoint.load()
        model.load_state_dict(saved["model"]); optimiser.load_state_dict(saved["optimiser"])
        torch.set_rng_state(saved["torch"]); random.setstate(saved["random"])
        print(train(model, optimiser, 5))
    """,
        MAINSTAY_CHECKPOINT_DIR=directory,
    )
    assert resumed == undisturbed and resumed
    assert state_file(directory, 5).suffix == ".pt"


def test_a_step_counts_once_every_rank_has_sealed_it(directory, as_rank, recwarn):
    for rank in (0, 1, 2):
        as_rank(rank, 3)
        assert checkpoint.latest() is None
        assert checkpoint.save(10, f"state of {rank}")
    for rank in (0, 1, 2):
        as_rank(rank, 3)
        assert checkpoint.latest() == 10
        assert checkpoint.load() == f"state of {rank}"
    as_rank(0, 3)
    assert checkpoint.save(20, "rank 0 is ahead")
    assert checkpoint.latest() == 10 and checkpoint.load() == "state of 0"
    assert not recwarn
    assert checkpoint.load(20) is None
    with pytest.raises(_seal.Incomplete):
        _seal.verify(directory, 20, 3)


def test_shards_of_different_attempts_or_worlds_make_no_whole(directory, as_rank, recwarn):
    as_rank(0, 2, attempt=0)
    checkpoint.save(10, "first life")
    as_rank(1, 2, attempt=1)
    checkpoint.save(10, "second life")
    assert checkpoint.latest() is None
    as_rank(0, 2, attempt=1)
    checkpoint.save(10, "second life")
    assert checkpoint.latest() == 10 and checkpoint.load() == "second life"
    assert not recwarn
    as_rank(0, 4, attempt=2)
    assert checkpoint.latest() is None
    with pytest.raises(_seal.Damaged):
        _seal.verify(directory, 10, 4)


def test_only_the_newest_whole_steps_are_kept(directory, as_rank, monkeypatch):
    for step in (10, 20, 30, 40):
        for rank in (0, 1):
            as_rank(rank, 2)
            assert checkpoint.save(step, step)
    assert names(directory) == ["step-000000000030", "step-000000000040"]
    as_rank(0, 2)
    checkpoint.save(50, 50)
    assert names(directory) == ["step-000000000030", "step-000000000040", "step-000000000050"]
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_KEEP", "1")
    as_rank(1, 2)
    checkpoint.save(50, 50)
    assert names(directory) == ["step-000000000050"]


def test_a_step_that_is_not_whole_never_pushes_a_whole_one_out(directory, as_rank):
    for rank in (0, 1):
        as_rank(rank, 2)
        checkpoint.save(10, 10)
    as_rank(0, 2)
    for step in range(20, 90, 10):
        assert checkpoint.save(step, step)
    assert checkpoint.latest() == 10


def test_saving_a_step_again_replaces_it_whole(directory):
    for turn in range(4):
        assert checkpoint.save(10, {"turn": turn})
        assert checkpoint.load() == {"turn": turn}
    assert len(list((directory / "step-000000000010/rank-00000").iterdir())) == 2


def test_threads_may_save_at_once(directory):
    threads = [threading.Thread(target=checkpoint.save, args=(step, step)) for step in range(8)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert checkpoint.load() == 7


def every_file(directory, step):
    return sorted(each for each in (directory / f"step-{step:012d}").rglob("*") if each.is_file())


def test_a_flipped_bit_anywhere_withdraws_the_step(directory, as_rank):
    for step in (10, 20):
        for rank in (0, 1):
            as_rank(rank, 2)
            checkpoint.save(step, {"step": step, "payload": os.urandom(100)})
    files = every_file(directory, 20)
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with warnings.catch_warnings(record=True) as recorded:
                warnings.simplefilter("always")
                if at % 16 == 0:
                    assert checkpoint.latest() == 10 and checkpoint.load()["step"] == 10, (file, at)
                    assert str(file.parent) in told(recorded)
                else:
                    with pytest.raises((_seal.Damaged, _seal.Incomplete)):
                        _seal.verify(str(directory), 20, 2)
        file.write_bytes(whole)
    assert checkpoint.latest() == 20


@pytest.mark.parametrize("damage", ["truncated", "grown", "empty", "removed", "a directory", "a link"])
def test_a_torn_file_withdraws_the_step(directory, recwarn, damage):
    for step in (10, 20):
        checkpoint.save(step, list(range(1000)))
    for file in every_file(directory, 20):
        whole = file.read_bytes()
        file.unlink()
        if damage == "truncated":
            file.write_bytes(whole[:-1])
        elif damage == "grown":
            file.write_bytes(whole + b"\0")
        elif damage == "empty":
            file.write_bytes(b"")
        elif damage == "a directory":
            file.mkdir()
        elif damage == "a link":
            (directory / "elsewhere").write_bytes(whole)
            file.symlink_to(directory / "elsewhere")
        assert checkpoint.latest() == 10 and checkpoint.load() == list(range(1000))
        assert checkpoint.load(20) is None
        file.rmdir() if damage == "a directory" else file.unlink(missing_ok=True)
        file.write_bytes(whole)
    assert checkpoint.latest() == 20
    assert "mainstay.checkpoint" in told(recwarn)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_loaded(directory, recwarn):
    checkpoint.save(10, 10)
    checkpoint.save(20, 20)
    os.chown(state_file(directory, 20), 12345, -1)
    assert checkpoint.load() == 10 and len(recwarn) == 1
    with pytest.raises(_seal.Damaged):
        _seal.verify(directory, 20, 1)


def test_a_manifest_from_a_newer_version_is_left_alone(directory, recwarn):
    checkpoint.save(10, 10)
    checkpoint.save(20, 20)
    path = directory / "step-000000000020/rank-00000/manifest.json"
    body = {**json.loads(path.read_text()), "format": 3}
    del body["seal"]
    path.write_bytes(_seal._encode(body))
    assert checkpoint.load() == 10 and len(recwarn) == 1
    with pytest.raises(_seal.Damaged):
        _seal.verify(directory, 20, 1)


WRONG = {
    "no directory": (1, {}, {"MAINSTAY_CHECKPOINT_DIR": ""}),
    "step none": (None, {}, {}),
    "step negative": (-1, {}, {}),
    "step huge": (10**30, {}, {}),
    "rank": (1, {}, {"RANK": "x"}),
    "rank out of world": (1, {}, {"RANK": "2", "WORLD_SIZE": "2"}),
    "keep": (1, {}, {"MAINSTAY_CHECKPOINT_KEEP": "0"}),
    "state": (1, lambda: 0, {}),
    "no path": (1, {}, {"MAINSTAY_CHECKPOINT_DIR": "/proc/nothing"}),
    "a file in the way": (1, {}, {"MAINSTAY_CHECKPOINT_DIR": "/etc/hostname/x"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_failed_save_is_reported_and_training_continues(directory, monkeypatch, recwarn, case):
    step, state, variables = WRONG[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert checkpoint.save(step, state) is False
    assert len(recwarn) == 1, told(recwarn)
    text = told(recwarn).replace(str(directory), "DIR").replace(f"uid {os.getuid()} ", "uid OURS ")
    # Texts of the system and of pickle.
    text = re.sub(r"PicklingError: .*?;|AttributeError: .*?;", "ERROR;", re.sub(r"\(.*\)", "(...)", text))
    snapshots.check("checkpoint", f"save: {case}", text)
    assert recwarn[0].filename == __file__
    assert not directory.exists() or names(directory) == []
    assert checkpoint.latest() is None and checkpoint.load() is None


def test_a_failed_save_does_not_raise_where_warnings_are_errors(python):
    done = python("import mainstay; assert mainstay.checkpoint.save(1, 1) is False", "-W", "error")
    assert "MAINSTAY_CHECKPOINT_DIR" in done.stderr


def test_a_full_disk_leaves_older_steps_and_no_litter(tmp_path):
    script = f"""
import os, sys
sys.path[:] = {sys.path!r}
os.environ["MAINSTAY_CHECKPOINT_DIR"] = "disk/steps"
import warnings, mainstay.checkpoint as checkpoint
big = b"x" * (4 << 20)
if len(sys.argv) > 1:
    import torch
    big = torch.zeros(1 << 20)
assert checkpoint.save(10, "small")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert checkpoint.save(20, big) is False
assert len(told) == 1, [str(each.message) for each in told]
assert "No space left on device (ENOSPC)" in str(told[0].message), told[0].message
assert "Free some space" in str(told[0].message) and "disk/steps" in str(told[0].message)
assert checkpoint.latest() == 10 and checkpoint.load() == "small"
assert os.listdir("disk/steps") == ["step-000000000010"], os.listdir("disk/steps")
assert checkpoint.save(30, "small again")
"""
    (tmp_path / "fill.py").write_text(script)
    (tmp_path / "disk").mkdir()
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none disk && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], cwd=tmp_path).returncode != 0:
        pytest.skip("a file system of its own needs a mount namespace (root)")
    for more in ([], ["torch"]):
        if more:
            pytest.importorskip("torch")
        subprocess.run([*mounted, sys.executable, "fill.py", *more], cwd=tmp_path, check=True)


def test_a_state_larger_than_files_may_be_is_refused_by_name(python, directory):
    python(
        """
        import resource, warnings, mainstay.checkpoint as checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        assert checkpoint.save(1, "small")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert checkpoint.save(2, b"x" * 10_000_000) is False
        assert "EFBIG" in str(told[0].message)
        assert checkpoint.load() == "small"
        """,
        MAINSTAY_CHECKPOINT_DIR=directory,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_an_unwritable_directory_is_reported_with_a_remedy(tmp_path):
    steps = tmp_path / "steps"
    steps.mkdir(mode=0o755)
    script = f"""
import os, sys, warnings
sys.path[:] = {sys.path!r}
import mainstay.checkpoint as checkpoint
os.setuid(12345)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert checkpoint.save(1, 1, directory={str(steps)!r}) is False
text = str(told[0].message)
assert len(told) == 1 and "EACCES" in text and {str(steps)!r} in text and "uid 12345 may write" in text, text
"""
    for parent in [tmp_path, *tmp_path.parents]:
        # Folders that others may enter are left unchanged, because other tests share them.
        mode = parent.stat().st_mode
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/") and not mode & 0o001:
            parent.chmod(0o755)
    subprocess.run([sys.executable, "-c", script], cwd="/", check=True)


def test_a_state_that_no_longer_unpickles_stops_the_job_instead_of_restarting_it(python, directory):
    python(
        "import mainstay\nclass Gone: pass\nassert mainstay.checkpoint.save(1, Gone())",
        MAINSTAY_CHECKPOINT_DIR=directory,
    )
    done = python("import mainstay; mainstay.checkpoint.load()", MAINSTAY_CHECKPOINT_DIR=directory, check=False)
    assert done.returncode == 1 and "AttributeError" in done.stderr and "Gone" in done.stderr


def doubt(directory, after, attempt=0, sure=True, job="job-1", **more):
    entry = {"job": job, "attempt": attempt, "after": after, "sure": sure, "why": "rank 2 differs from the majority", **more}
    (directory / "doubtful.json").write_text(json.dumps([entry]))


def save_steps(as_rank, steps, attempt=0):
    as_rank(0, 1, attempt)
    for step in steps:
        assert checkpoint.save(step, {"step": step, "attempt": attempt})


def test_doubtful_steps_are_offered_with_a_warning_unless_asked_otherwise(directory, as_rank, monkeypatch):
    save_steps(as_rank, (10, 20))
    doubt(directory, after=15)
    with pytest.warns(RuntimeWarning, match="step 20 .*rank 2"):
        assert checkpoint.latest() == 20
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
    with pytest.warns(RuntimeWarning, match="step 20 "):
        assert checkpoint.latest() == 10
    with pytest.warns(RuntimeWarning, match="step 20 "):
        assert checkpoint.load()["step"] == 10


def test_where_only_two_differ_only_the_strictest_policy_skips(directory, as_rank, monkeypatch):
    save_steps(as_rank, (10, 20))
    doubt(directory, after=15, sure=False)
    for policy, offered in (("skip", 20), ("skip-all", 10)):
        monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", policy)
        with pytest.warns(RuntimeWarning, match="doubtful"):
            assert checkpoint.latest() == offered


def test_steps_of_a_later_attempt_or_another_job_are_not_doubtful(directory, as_rank, monkeypatch):
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
    save_steps(as_rank, (10, 20))
    doubt(directory, after=15)
    save_steps(as_rank, (20,), attempt=1)
    assert checkpoint.latest() == 20 and checkpoint.load()["attempt"] == 1
    doubt(directory, after=15, attempt=1, job="another")
    assert checkpoint.latest() == 20


def test_a_doubt_about_one_launch_does_not_affect_steps_of_another(directory, as_rank, monkeypatch):
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
    monkeypatch.setenv("MAINSTAY_LAUNCH", "demo@1.a")
    save_steps(as_rank, (10, 20))
    doubt(directory, after=15, run="demo@1.a")
    with pytest.warns(RuntimeWarning, match="step 20 "):
        assert checkpoint.latest() == 10
    # Another launch with the same job name, whose attempts start from 0 again.
    monkeypatch.setenv("MAINSTAY_LAUNCH", "demo@1.b")
    save_steps(as_rank, (20,))
    assert checkpoint.latest() == 20 and checkpoint.load()["step"] == 20
    # A record of an earlier version names no launch and counts for all launches.
    doubt(directory, after=15)
    with pytest.warns(RuntimeWarning, match="step 20 "):
        assert checkpoint.latest() == 10


def test_shards_of_two_launches_make_no_step(directory, as_rank, monkeypatch):
    for step, launches in ((10, "aa"), (20, "ab")):
        for rank, launch in enumerate(launches):
            as_rank(rank, 2, 0)
            monkeypatch.setenv("MAINSTAY_LAUNCH", f"demo@1.{launch}")
            assert checkpoint.save(step, {"step": step})
    assert checkpoint.latest() == 10


def test_ranks_choose_the_step_that_the_leader_of_several_hosts_would_choose(tmp_path, as_rank, monkeypatch):
    cases = Path(__file__).resolve().parents[3] / "agent" / "checkpoint" / "tests" / "choices.json"
    monkeypatch.setenv("MAINSTAY_JOB_ID", "job-1")
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_KEEP", "9")
    for number, case in enumerate(json.loads(cases.read_text())):
        monkeypatch.setenv("MAINSTAY_CHECKPOINT_DIR", str(tmp_path / str(number)))
        for shard in case["saved"]:
            as_rank(shard["rank"], shard.get("of", case["world"]), shard.get("attempt", 0))
            monkeypatch.setenv("MAINSTAY_LAUNCH", f"demo@1.{shard.get('launch', 'a')}")
            assert checkpoint.save(shard["step"], {"step": shard["step"]}), case["case"]
        for rank in range(case["world"]):
            as_rank(rank, case["world"], 2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                assert checkpoint.latest() == case["chosen"], case["case"]


def test_doubtful_steps_do_not_push_out_a_trusted_one(directory, as_rank, monkeypatch):
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
    save_steps(as_rank, (10, 20))
    doubt(directory, after=20)
    save_steps(as_rank, (30, 40, 50))
    with pytest.warns(RuntimeWarning, match="step 50 "):
        assert checkpoint.latest() == 20


@pytest.mark.parametrize("spoilt", ["", "{}", "[7]", "\x00", '[{"job": "job-1"}]'])
def test_a_spoilt_mark_hides_no_step(directory, as_rank, monkeypatch, spoilt):
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
    save_steps(as_rank, (10,))
    (directory / "doubtful.json").write_text(spoilt)
    assert checkpoint.latest() == 10


def test_an_invalid_policy_is_reported(directory, as_rank, monkeypatch):
    save_steps(as_rank, (10,))
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_DOUBTFUL", "perhaps")
    with pytest.warns(RuntimeWarning, match="use, skip, skip-all"):
        assert checkpoint.latest() is None


def test_a_rank_whose_chosen_shard_is_gone_fails_instead_of_choosing_another_step(directory, as_rank, monkeypatch):
    as_rank(0, 1)
    assert checkpoint.save(3, "three")
    as_rank(0, 1, attempt=1)
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_RESUME", "3 " + "ab" * 32)
    assert checkpoint.latest() == 3
    with pytest.raises(RuntimeError) as raised:
        checkpoint.load()
    snapshots.check("checkpoint", "load: the chosen shard is gone", str(raised.value).replace(str(directory), "DIR"))
    assert checkpoint.save(4, "four")
    assert checkpoint.load() == "four", "what was chosen at the start is not the newest any more"
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_RESUME", "")
    as_rank(0, 1, attempt=2)
    assert checkpoint.load() == "four"


def test_temporary_files_of_another_container_or_host_are_left_alone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    step = tmp_path / "step-000000000001"
    step.mkdir()
    mine = _disk.aside("rank-00000")
    left = mine.replace(f".{os.getpid()}-", f".{gone.pid}-")
    of_older_version = f".rank-00000.{gone.pid}.tmp"
    # Its process may live: only its place could tell. No process writes for a day.
    elsewhere = left.replace(_disk.place(), "0123456789abcdef")
    of_last_year = f".rank-00000.{gone.pid}-0123456789abcdef-{time.time_ns() - 365 * 24 * 3600 * 10**9:x}.tmp"
    for name in (mine, left, of_older_version, elsewhere, of_last_year):
        (step / name).mkdir()
    _seal.clear_aside(str(tmp_path), 0)
    assert [each.name for each in step.iterdir()] == [elsewhere]
    assert _disk.aside("rank-00000") != mine


def test_files_that_do_not_answer_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "_PATIENCE_S", 0.05)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Opening it waits for a writer, as opening a file of a silent file system waits for its server.
    with pytest.raises(_disk.Silent):
        _disk.ask(lambda: open(fifo, "rb").close())
    with pytest.raises(_disk.Silent):
        _disk.ask(os.listdir, tmp_path)
    assert _disk._waits is not None
    with open(fifo, "wb"):
        _disk._waits.join()
    assert _disk.ask(os.listdir, tmp_path) == ["fifo"]
    with pytest.raises(FileNotFoundError):
        _disk.ask(os.listdir, tmp_path / "missing")
