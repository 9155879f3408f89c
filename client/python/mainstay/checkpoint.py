"""Local checkpoints: each rank saves its state on its host, and a restarted job continues from the newest whole step.

Under ``mainstay run`` a save is one copy into the launcher's memory. The launcher computes the checksums and writes to
the disk in the background, and the rank may die at any time after the copy. Without a launcher or enough memory, the
rank writes to the disk itself.

    start = 0
    saved = mainstay.checkpoint.load()
    if saved is not None:
        model.load_state_dict(saved["model"])
        start = saved["step"] + 1
    for n in range(start, steps):
        ...
        if n % 100 == 0:
            mainstay.checkpoint.save(n, {"step": n, "model": model.state_dict(), ...})

Every rank calls `save` with its own state and the same step. A step is offered only if all ranks have sealed it and
every byte matches the seals, so that all ranks reach the same result. In a job of several hosts the launchers agree on
the step before the ranks start, and ``MAINSTAY_CHECKPOINT_RESUME`` names it. `mainstay run` sets the directory in
``MAINSTAY_CHECKPOINT_DIR`` and the number of whole steps to keep in ``MAINSTAY_CHECKPOINT_KEEP`` (2).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import pickle
import sys
import threading
import time
import warnings
from typing import Any, NamedTuple, Optional, TypeVar, overload

from . import _container, _disk, _doubt, _memory_steps, _native, _pool, _seal, _shard

__all__ = ["due", "latest", "load", "reserve", "save"]

_DIRECTORY = "MAINSTAY_CHECKPOINT_DIR"
_KEEP = "MAINSTAY_CHECKPOINT_KEEP"
_RESUME = "MAINSTAY_CHECKPOINT_RESUME"
_saving = threading.Lock()
_S = TypeVar("_S")


class _Setting(Exception):
    """A setting of the environment, or an argument, that is missing or invalid; the text names what is valid."""


class _Home(NamedTuple):
    directory: str
    rank: int
    world_size: int


class _Chosen(NamedTuple):
    """The choice of the launchers of all hosts: the step, and the root of this rank's shard."""

    step: int
    root: str


#: The attempt of this process's last save. After it, the step chosen at the start is no longer the newest.
_saved_in: Optional[int] = None


def save(step: int, state: Any, *, directory: Optional[str] = None, alike: Optional[str] = None) -> bool:
    """Saves this rank's `state` of `step` and returns whether it survives the end of this process: in the launcher's
    memory, or, without one, sealed on the disk.

    Ranks that pass the same name as `alike` declare that their tensors are equal, as those of data-parallel peers are.
    The saved tensors are compared over all hosts whose agents store replicas, and differences are reported. The rest
    of the state is not compared.

    A failure (a full disk, no permission, a state that cannot be pickled) causes one warning and leaves older steps
    unchanged; it does not raise. By default, steps older than the two newest whole ones are removed.
    """
    try:
        number = _step_number(step)
        home = _home(directory)
        keep = _number(_KEEP, 2, at_least=1)
        with _saving, _standing_still("checkpoint"):
            identity = _seal.Identity(_job(), _attempt(), number, home.rank, home.world_size)
            facts, suffix, serialise = _serialisation(state)
            if _into_memory(home, identity, {**facts, "alike": alike}, state):
                _note_saved(identity.attempt)
                return True
            _disk.check_that_it_answers(home.directory)
            _quietly(_seal.clear_aside, home.directory, home.rank)
            _seal.write(home.directory, identity, facts, suffix, serialise, _attempt)
            _note_saved(identity.attempt)
            if _seal.looks_whole(home.directory, number, home.world_size):
                # Doubtful steps must not displace the last trusted one.
                _quietly(_seal.prune, home.directory, home.world_size, keep, lambda step: _doubtful(home, step) is None)
        return True
    except Exception as error:
        _warn(f"mainstay.checkpoint.save: step {step!r} was not saved{_where(directory)}: {_describe(error)}; training "
              f"goes on and older steps are untouched. {_advice(error)}")
        return False


def due() -> bool:
    """Whether a save is due, given the cost of the job's own saves and failures.

    True once each time, after the same step on all ranks that call it after each `mainstay.step`. Until the job has
    made three saves, a save is due once a minute. False without a launcher.

        if mainstay.checkpoint.due():
            mainstay.checkpoint.save(n, state)
    """
    return bool(_native.save_due())


def _standing_still(what: str):
    """The section of a save or a load. None in another thread: that does not stop training, and sections belong to the
    training thread."""
    if threading.current_thread() is threading.main_thread():
        return _native.section(what)
    return contextlib.nullcontext()


def reserve(state: Any, *, directory: Optional[str] = None) -> bool:
    """Prepares memory for states as large as this one, so that the first save is as fast as the others.

    Returns whether there is such memory. Without a launcher or enough memory, saves go to the disk. Does not raise.
    """
    try:
        home = _home(directory)
        memory = _pool.memory_of_rank(home.directory, home.rank)
        if memory is None:
            return False
        return memory.reserve(_pool.size_for(state))
    except Exception as error:
        _warn(f"mainstay.checkpoint.reserve: {_describe(error)}; the first save takes longer")
        return False


def _into_memory(home: _Home, identity, facts: dict, state: Any, any_world: bool = False) -> bool:
    """Copies the state into the launcher's memory; returns whether it did. Raises any error of pickling, and Late if
    this rank is late."""
    memory = _pool.memory_of_rank(home.directory, home.rank)
    if memory is None:
        return False
    memory.note_world(any_world)
    try:
        return bool(memory.save(state, identity, facts, _attempt))
    except _pool.NoSlot as slow:
        _warn(f"mainstay.checkpoint.save: {slow}: saves are more frequent than the disk can write. This one is written to the disk while training waits", 4)
        return False
    except _pool.Late as late:
        raise _Setting(str(late)) from None


def latest(*, directory: Optional[str] = None) -> Optional[int]:
    """The newest step that is whole for every rank, or None. Reads and verifies all of it; does not raise."""
    try:
        home = _home(directory)
        chosen = _chosen(home)
        if chosen is not None:
            return chosen.step
        wanted = _doubt_policy()
        memory = _in_memory(home)
        for step in memory.with_those_of(_steps_on_disk(home, "latest", memory.has_any())):
            try:
                origin = memory.verify(step, lambda text: _warn(f"mainstay.checkpoint.latest: {text}", 4))
                if origin is None:
                    _seal.verify(home.directory, step, home.world_size)
                if _passes(home, step, wanted, "latest", 3, origin):
                    return step
            except _seal.Incomplete:
                continue
            except _seal.Damaged as damage:
                _warn(_skipped("latest", step, damage))
    except _Setting as setting:
        if os.environ.get(_DIRECTORY) or directory is not None:
            _warn(f"mainstay.checkpoint.latest: {setting}; no step is offered")
    except OSError as error:
        _warn(f"mainstay.checkpoint.latest: {_describe(error)}; no step is offered. {_advice(error)}")
    return None


@overload
def load(
    step: Optional[int] = None, *, into: None = None, directory: Optional[str] = None, replicated: bool = False
) -> Optional[Any]: ...
@overload
def load(
    step: Optional[int] = None, *, into: _S, directory: Optional[str] = None, replicated: bool = False
) -> Optional[_S]: ...
def load(
    step: Optional[int] = None, *, into: Any = None, directory: Optional[str] = None, replicated: bool = False
) -> Any:
    """This rank's state of `step`, or of the newest whole step; None if there is none.

    A damaged step causes a warning; without `step` the next older whole one is loaded. Raises errors of unpickling, for
    example if a class no longer exists, because starting from scratch would be worse than stopping. Also raises
    RuntimeError if the launchers chose a step and this rank's shard of it is missing, or if a step in memory changed
    after other ranks had read it.

    ``into`` is a state like the one that was saved. Tensors and arrays are loaded into the memory of those with the
    same path, type and shape, on the host or on a CUDA device as they were saved, and the returned state shares that
    memory. This saves the time for new memory, the copy out of it, and room for a second state on a device. Raises
    RuntimeError if such memory was written to and then nothing could be loaded.

    ``replicated`` declares that all ranks have saved the same state, as with plain data parallelism. A step of any
    number of ranks is then loaded from any intact shard. Launchers of several hosts copy a shard to each host. If
    torch.distributed is initialized, the ranks choose the step together.
    """
    with _standing_still("restore"):
        targets = None if into is None else _container.Targets(into)
        taken = _take_replicated(step, directory, targets) if replicated else _take(step, directory, targets)
        if taken is None:
            if targets is not None and targets.written:
                raise RuntimeError("mainstay.checkpoint.load: no step is whole, and the values in `into` were overwritten")
            return None
        if isinstance(taken, _memory_steps.Loaded):
            return taken.state
        manifest, file = taken
        with file:
            if manifest["format"] == 2:
                return _shard.Reader(file.fileno(), manifest).state(targets)
            if manifest["serialisation"] == "torch":
                import torch

                # The file belongs to this user (see _seal), so it is as trusted as the script itself.
                return torch.load(file, weights_only=False)
            return _container.of_the_program(functools.partial(pickle.load, file))


def _take(step: Optional[int], directory: Optional[str], into=None):
    try:
        home = _home(directory)
        chosen = _chosen(home)
        if chosen is not None and step in (None, chosen.step):
            return _take_chosen(home, chosen, into)
        memory = _in_memory(home)
        if step is not None:
            return _take_one(home, memory, _step_number(step), into)
        wanted = _doubt_policy()
        for candidate in memory.with_those_of(_steps_on_disk(home, "load", memory.has_any())):
            try:
                # Doubt is checked first, so that no state is unpickled only to be discarded.
                in_memory = memory.origin(candidate)
                if in_memory is not None and not _passes(home, candidate, wanted, "load", 4, in_memory):
                    continue
                taken = memory.take(candidate, lambda text: _warn(f"mainstay.checkpoint.load: {text}", 5), into)
                if taken is not None:
                    return taken
                taken = _seal.take(home.directory, candidate, home.rank, home.world_size)
                if in_memory is not None or _passes(home, candidate, wanted, "load", 4):
                    return taken
                taken[1].close()
            except _seal.Incomplete:
                continue
            except _seal.Damaged as damage:
                _warn(_skipped("load", candidate, damage), depth=4)
    except _Setting as setting:
        if os.environ.get(_DIRECTORY) or directory is not None or step is not None:
            _warn(f"mainstay.checkpoint.load: {setting}; nothing is loaded", depth=4)
    except OSError as error:
        _warn(f"mainstay.checkpoint.load: {_describe(error)}; nothing is loaded. {_advice(error)}", depth=4)
    return None


def _take_replicated(step: Optional[int], directory: Optional[str], into=None):
    """The state of `step`, or of the newest step, saved by any number of ranks. All ranks have the same state."""
    try:
        home = _home(directory)
        memory = _pool.memory_of_rank(home.directory, home.rank)
        if memory is not None:
            memory.note_world(True)
        chosen = _chosen(home)
        wanted = _doubt_policy()
        numbers = _steps_on_disk(home, "load", chosen is not None) if step is None else [_step_number(step)]
        limit = None
        while True:
            found = _newest_replicated(home, [number for number in numbers if limit is None or number <= limit], chosen, wanted)
            number = -1 if found is None else found[0]
            numbers_of_all = _all_gathered(number)
            limit = min(numbers_of_all)
            if max(numbers_of_all) == limit:
                break
            if found is not None and found[1] is not None:
                found[1][1].close()
            if limit < 0:
                return None
        if found is None:
            return None
        return found[1] if found[1] is not None else _take_chosen(home, chosen, into)
    except _Setting as setting:
        if os.environ.get(_DIRECTORY) or directory is not None or step is not None:
            _warn(f"mainstay.checkpoint.load: {setting}; nothing is loaded", depth=4)
    except OSError as error:
        _warn(f"mainstay.checkpoint.load: {_describe(error)}; nothing is loaded. {_advice(error)}", depth=4)
    return None


def _newest_replicated(home: _Home, numbers: list, chosen: Optional[_Chosen], wanted: str):
    """The newest of these steps with an intact shard: its number, manifest and open file; or the one that the
    launchers chose, without a file."""
    for number in numbers:
        if chosen is not None and number <= chosen.step:
            return chosen.step, None
        for rank in _ranks_of(home, number):
            taken = _seal.take_one(home.directory, number, rank)
            if taken is None:
                continue
            if _is_of_this_attempt(taken[0]):
                # Saved by a rank that started earlier. Other ranks may not have seen it.
                taken[1].close()
                continue
            if _passes(home._replace(rank=rank), number, wanted, "load", 5):
                return number, taken
            taken[1].close()
            break
    return (chosen.step, None) if chosen is not None else None


def _is_of_this_attempt(manifest: dict) -> bool:
    launch = os.environ.get("MAINSTAY_LAUNCH")
    return bool(launch) and manifest.get("run") == launch and manifest["attempt"] >= _attempt()


def _ranks_of(home: _Home, number: int) -> list:
    """The ranks that have a shard of a step, this one first."""
    step_home = _seal.step_directory(home.directory, number)
    names = os.listdir(step_home) if os.path.isdir(step_home) else []
    ranks = [int(name[len("rank-"):]) for name in names if name.startswith("rank-") and name[len("rank-"):].isdecimal()]
    return sorted(ranks, key=lambda rank: (rank != home.rank, rank))


def _all_gathered(number: int) -> list:
    """The numbers of all ranks, if they can communicate."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return [number]
    numbers_of_all = [None] * distributed.get_world_size()
    distributed.all_gather_object(numbers_of_all, number)
    return numbers_of_all


def _note_saved(attempt: int) -> None:
    global _saved_in
    _saved_in = attempt


def _chosen(home: _Home) -> Optional[_Chosen]:
    """The step from which all hosts of the job continue. None if the ranks choose it themselves, or after a save of
    this rank."""
    step, _, root = os.environ.get(_RESUME, "").partition(" ")
    if not step.isdecimal() or not root or _saved_in == _attempt():
        return None
    is_the_jobs = _pool.is_same(os.environ.get(_DIRECTORY, ""), home.directory)
    return _Chosen(int(step), root) if is_the_jobs else None


def _steps_on_disk(home: _Home, call: str, memory_serves: bool) -> list:
    """All steps that have a directory, newest first. None of them while the file system does not answer, if there is
    a step elsewhere: a rank without any would start from scratch, so it waits."""
    try:
        return list(_disk.ask(_seal.steps, home.directory))
    except _disk.Silent as silent:
        then = "only steps in memory are considered" if memory_serves else "there is no step in memory, so it is waited for"
        _warn(f"mainstay.checkpoint.{call}: {home.directory}: {silent}; {then}", depth=5)
    return [] if memory_serves else _seal.steps(home.directory)


def _take_chosen(home: _Home, chosen: _Chosen, into=None):
    """This rank's shard of the chosen step. Raises without it: a rank with another step would be worse than a failed
    attempt."""
    copy = _pool.own(home.directory, home.rank, chosen.root, _memory_steps.read_manifest)
    if copy is not None:
        try:
            return _memory_steps.Loaded(_pool.state_of(copy, _attempt(), into))
        except _pool.Spoilt as spoilt:
            _warn(f"mainstay.checkpoint.load: step {chosen.step}: {spoilt}; reading it from the disk instead", 6)
    taken = _seal.take_one(home.directory, chosen.step, home.rank)
    if taken is not None:
        if taken[0].get("root") == chosen.root:
            return taken
        taken[1].close()
    raise RuntimeError(
        f"mainstay.checkpoint.load: all hosts go on from step {chosen.step}, and the shard of rank {home.rank} is not on this host "
        f"any more; the next start brings it here again"
    )


def _in_memory(home: _Home):
    return _memory_steps.MemorySteps.open(home.directory, home.rank, home.world_size, _attempt())


def _doubtful(home: _Home, step: int, origin=None):
    try:
        return _disk.ask(_doubt.about, home.directory, step, home.rank, origin)
    except _disk.Silent:
        return None  # As if the list could not be read.


def _doubt_policy() -> str:
    try:
        return _doubt.policy()
    except ValueError as error:
        raise _Setting(str(error)) from None


def _passes(home: _Home, step: int, wanted: str, call: str, depth: int, origin=None) -> bool:
    """Whether a whole step may be offered. Warns if the step is doubtful."""
    doubt = _doubtful(home, step, origin)
    if doubt is None:
        return True
    skipped = _doubt.skips(doubt, wanted)
    then = "skipped" if skipped else f"offered anyway ({_doubt.POLICY}=skip skips it)"
    _warn(f"mainstay.checkpoint.{call}: step {step} is doubtful and {then}: {doubt.get('why', 'replicas differed')}", depth + 1)
    return not skipped


def _take_one(home: _Home, memory, step: int, into=None):
    taken = memory.take(step, lambda text: _warn(f"mainstay.checkpoint.load: {text}", 6), into)
    if taken is not None:
        return taken
    try:
        return _seal.take(home.directory, step, home.rank, home.world_size)
    except (_seal.Incomplete, _seal.Damaged) as reason:
        _warn(f"mainstay.checkpoint.load: step {step} in {home.directory} is not whole: {reason}; nothing is loaded",
              depth=5)
    return None


def _serialisation(state: Any):
    """Facts for the manifest, file suffix and writer of `state`: torch if the script uses it, else pickle."""
    software = {"mainstay": _native.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    facts = {"created_unix_s": int(time.time()), "software": software}
    launch = os.environ.get("MAINSTAY_LAUNCH")
    if launch:
        facts["run"] = launch
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "save"):
        software["torch"] = str(torch.__version__)
        return {**facts, "serialisation": "torch"}, ".pt", lambda file: torch.save(state, file)
    return {**facts, "serialisation": "pickle"}, ".pickle", lambda file: pickle.dump(state, file, protocol=5)


def _home(directory: Optional[str]) -> _Home:
    path = directory if directory is not None else os.environ.get(_DIRECTORY)
    if not path:
        raise _Setting(f"no directory is set: start with `mainstay run`, set {_DIRECTORY} or pass directory=")
    try:
        path = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise _Setting(f"directory={directory!r} is not a path") from None
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1, at_least=1)
    if rank >= world_size:
        raise _Setting(f"RANK={rank} does not fit WORLD_SIZE={world_size}")
    return _Home(path, rank, world_size)


def _number(name: str, default: int, at_least: int = 0) -> int:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or int(text) < at_least:
        raise _Setting(f"{name}={text!r} in the environment is not a whole number from {at_least}")
    return int(text)


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise _Setting(f"a step is a whole number, not {type(step).__name__}") from None
    if not 0 <= number < 10**18:
        raise _Setting(f"a step is from 0 to 10**18-1, not {number}")
    return number


def _job() -> str:
    return os.environ.get("MAINSTAY_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or ""


def _attempt() -> int:
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _quietly(action, *arguments) -> None:
    """Runs a cleanup. If it fails, the save does not fail, and the next save tries again."""
    try:
        action(*arguments)
    except OSError:
        pass


def _skipped(call: str, step: int, damage: Exception) -> str:
    then = "an older whole step is offered if there is one"
    return f"mainstay.checkpoint.{call}: step {step} is skipped: {damage}; {then}"


def _where(directory: Optional[str]) -> str:
    path = directory if directory is not None else os.environ.get(_DIRECTORY)
    return f" in {path}" if path else ""


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        path = f": {error.filename}" if error.filename else ""
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)}){path}"
    return str(error) if isinstance(error, _Setting) else f"{type(error).__name__}: {error}"


_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _SPACE:
        return f"Free some space there, or set {_DIRECTORY} to a larger disk."
    if isinstance(error, OSError) and error.errno in _PLACE:
        return f"Make it a directory that uid {os.geteuid()} may write, or set {_DIRECTORY} to another."
    if isinstance(error, (OSError, _Setting)):
        return ""
    return "The state must be something that torch.save or pickle can write."


def _warn(text: str, depth: int = 3) -> None:
    try:
        warnings.warn(text.rstrip(), RuntimeWarning, stacklevel=depth)
    except RuntimeWarning:
        # Warnings are errors (-W error), and a checkpoint must not stop training.
        print(text.rstrip(), file=sys.stderr)
