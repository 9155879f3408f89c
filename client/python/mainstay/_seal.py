"""Shards and their seals: how a rank's part of a step is stored on disk, and when a step counts as whole.

    <directory>/step-000000000010/rank-00003/state.pt         the rank's state
                                             manifest.json    its size, checksum and identity

A rank writes format 1 itself, with this module. The launcher's keeper writes format 2 for a shard that a rank has
copied into its memory: `state.safetensors` with checksums of its chunks and a root over them.

The manifest seals a shard. It appears last and atomically: through the directory's rename for a new shard, through its
own rename if the same step is saved again. A step is whole when one attempt of one job has sealed the shards of all
ranks and every file matches its manifest. Other steps are not offered.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from typing import BinaryIO, Callable, Iterator, NamedTuple, Optional, Tuple

from . import _disk, _native

FORMAT = 1
MANIFEST = "manifest.json"
_LONGEST = 32 << 20
_STEP = re.compile(r"step-(\d{12,})")
_ASIDE = re.compile(r"\.(?:rank|step)-\d+\.([0-9a-f-]+)\.tmp")


class Incomplete(Exception):
    """Not every rank has sealed its shard of the step yet."""


class Damaged(Exception):
    """A shard exists and must not be used; the text names the file and the reason."""


class Late(Exception):
    """The round of the shard ended before the shard could be sealed."""


class Identity(NamedTuple):
    """The identity of a shard. The shards of a step differ only in the rank."""

    job: str
    attempt: int
    step: int
    rank: int
    world_size: int


def step_directory(directory: str, step: int) -> str:
    return os.path.join(directory, f"step-{step:012d}")


def steps(directory: str) -> list:
    """All steps that have a directory, newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for match in map(_STEP.fullmatch, names) if match), reverse=True)


def write(
    directory: str, identity: Identity, facts: dict, suffix: str, serialise: Callable, attempt: Callable
) -> None:
    """Writes and seals one shard. After an error nothing of it is left, and the previous shard is unchanged.

    ``attempt`` returns the current attempt. If the rank has started another attempt while this thread was writing,
    nothing is sealed.
    """
    home = step_directory(directory, identity.step)
    _disk.make_directory(home)
    shard = _shard_directory(home, identity.rank)
    if os.path.isdir(shard):
        _write_again(shard, identity, facts, suffix, serialise, attempt)
        return
    aside = os.path.join(home, _disk.aside(os.path.basename(shard)))
    try:
        _disk.do(os.mkdir, aside)
        content = _write_state(os.path.join(aside, f"state{suffix}"), serialise)
        _disk.write_file(os.path.join(aside, MANIFEST), _manifest(identity, facts, f"state{suffix}", *content))
        _disk.sync_directory(aside)
        _check_in_time(identity, attempt)
        _disk.do(os.rename, aside, shard)
        _disk.sync_directory(home)
    except BaseException:
        _clean(_disk.remove_tree, aside)
        _clean(os.rmdir, home)
        raise


def _write_again(
    shard: str, identity: Identity, facts: dict, suffix: str, serialise: Callable, attempt: Callable
) -> None:
    """Seals a shard again if one exists: writes the new state next to the old one, then the manifest over the old
    manifest."""
    turn = 1
    while os.path.lexists(os.path.join(shard, f"state.{turn}{suffix}")):
        turn += 1
    name = f"state.{turn}{suffix}"
    state = os.path.join(shard, name)
    manifest = os.path.join(shard, _disk.aside(MANIFEST))
    try:
        content = _write_state(state, serialise)
        _disk.write_file(manifest, _manifest(identity, facts, name, *content))
        # The state's name must be on disk before the manifest that refers to it.
        _disk.sync_directory(shard)
        _check_in_time(identity, attempt)
        _disk.do(os.rename, manifest, os.path.join(shard, MANIFEST))
    except BaseException:
        _clean(_disk.remove_tree, state)
        _clean(_disk.remove_tree, manifest)
        raise
    _disk.sync_directory(shard)
    for entry in os.listdir(shard):
        if entry not in (name, MANIFEST):
            _disk.remove_tree(os.path.join(shard, entry))


def _check_in_time(identity: Identity, attempt: Callable) -> None:
    now = attempt()
    if now != identity.attempt:
        raise Late(f"it is of attempt {identity.attempt}, and this rank has gone on to attempt {now}")


def _write_state(path: str, serialise: Callable) -> Tuple[int, str]:
    with _disk.Writer(path) as writer:
        try:
            serialise(writer)
            return writer.seal()
        except Exception as error:
            raise writer.error or error from None


def _clean(action, path: str) -> None:
    try:
        action(path)
    except OSError:
        pass  # The error that caused this cleanup is the one to report.


def _shard_directory(home: str, rank: int) -> str:
    return os.path.join(home, f"rank-{rank:05d}")


def _manifest(identity: Identity, facts: dict, name: str, size: int, checksum: str) -> bytes:
    files = {name: {"size": size, "xxh3_128": checksum}}
    return _encode({"format": FORMAT, **identity._asdict(), **facts, "files": files})


def _encode(body: dict) -> bytes:
    seal = _native.checksum_bytes(_canonical(body))
    return _canonical({**body, "seal": seal})


def _canonical(document: dict) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n"


def take(directory: str, step: int, rank: int, world_size: int) -> Tuple[dict, BinaryIO]:
    """The manifest and the verified, opened state of `rank`, after every shard of the step has been verified.

    Raises Incomplete, Damaged, or OSError if the directory cannot be read.
    """
    mine = None
    try:
        for manifest, file in _verified(directory, step, world_size):
            if manifest["rank"] == rank:
                mine = manifest, file
            else:
                file.close()
        if mine is None:
            raise Incomplete(f"rank {rank} is not among the {world_size} ranks of step {step}")
        return mine
    except BaseException:
        if mine is not None:
            mine[1].close()
        raise


def verify(directory: str, step: int, world_size: int) -> None:
    """Raises what :func:`take` raises, unless the step is whole and every byte matches the seals."""
    for _, file in _verified(directory, step, world_size):
        file.close()


def made_in(directory: str, step: int, rank: int) -> Tuple[str, int]:
    """Job and attempt in which `rank` sealed its shard of `step`. Raises what reading its manifest raises."""
    return origin(directory, step, rank)[:2]


def origin(directory: str, step: int, rank: int) -> Tuple[str, int, Optional[str]]:
    """Job, attempt and, if known, the launch of the job. Raises what reading the manifest raises."""
    manifest = _read_manifest(_shard_directory(step_directory(directory, step), rank), rank)
    return manifest["job"], manifest["attempt"], manifest.get("run")


def take_one(directory: str, step: int, rank: int) -> Optional[Tuple[dict, BinaryIO]]:
    """The manifest and the open file of one shard, if every byte matches the seal. Does not read other shards."""
    shard = _shard_directory(step_directory(directory, step), rank)
    try:
        manifest = _read_manifest(shard, rank)
        file = _open_state(manifest, shard)
    except (Incomplete, Damaged, OSError):
        return None
    sealed = _sealed_file(manifest)[1]
    try:
        if _native.checksum_file(file.fileno()) == (sealed["size"], sealed["xxh3_128"]):
            return manifest, file
    except OSError:
        pass
    file.close()
    return None


def is_intact(directory: str, step: int, rank: int) -> bool:
    """Whether every byte of a shard matches its seal."""
    taken = take_one(directory, step, rank)
    if taken is not None:
        taken[1].close()
    return taken is not None


def looks_whole(directory: str, step: int, world_size: int) -> bool:
    """Whether all manifests exist and agree and all files have the right size. Does not read the files."""
    try:
        for manifest, shard in _manifests(directory, step, world_size):
            _open_state(manifest, shard).close()
        return True
    except (Incomplete, Damaged, OSError):
        return False


def _verified(directory: str, step: int, world_size: int) -> Iterator[Tuple[dict, BinaryIO]]:
    for manifest, shard in list(_manifests(directory, step, world_size)):
        file = _open_state(manifest, shard)
        try:
            size, checksum = _native.checksum_file(file.fileno())
            sealed = _sealed_file(manifest)[1]
            if (size, checksum) != (sealed["size"], sealed["xxh3_128"]):
                raise Damaged(f"{file.name} is not what its manifest says: its bytes have changed since it was sealed")
        except BaseException:
            file.close()
            raise
        yield manifest, file


def _manifests(directory: str, step: int, world_size: int) -> Iterator[Tuple[dict, str]]:
    """Each rank's manifest and shard directory, after checking that they belong to one world, job and attempt."""
    home = step_directory(directory, step)
    first = launch = None
    for rank in range(world_size):
        shard = _shard_directory(home, rank)
        manifest = _read_manifest(shard, rank)
        identity = Identity(*(manifest[field] for field in Identity._fields))
        if (identity.step, identity.rank) != (step, rank):
            raise Damaged(f"{shard}: its manifest speaks of step {identity.step}, rank {identity.rank}")
        if identity.world_size != world_size:
            raise Damaged(
                f"{shard} was saved in a world of {identity.world_size} ranks, and this job has {world_size}; "
                "shards are not re-divided"
            )
        first = first or identity
        if (identity.job, identity.attempt) != (first.job, first.attempt):
            raise Incomplete(
                f"{shard} is of job {identity.job!r}, attempt {identity.attempt}, and rank 0's of "
                f"job {first.job!r}, attempt {first.attempt}"
            )
        launch = launch or manifest.get("run")
        if manifest.get("run") not in (None, launch):
            raise Incomplete(f"{shard} is of launch {manifest['run']!r}, and another rank's of launch {launch!r}")
        yield manifest, shard


def _read_manifest(shard: str, rank: int) -> dict:
    return read_manifest(os.path.join(shard, MANIFEST), rank)


def read_manifest(path: str, rank: int) -> dict:
    """The manifest in `path`. Raises Incomplete if there is none, Damaged if it has changed since it was written."""
    try:
        with _open_own(path) as file:
            content = file.read(_LONGEST)
    except FileNotFoundError:
        raise Incomplete(f"rank {rank} has not sealed its shard ({path} is missing)") from None
    complaint = _native.manifest_complaint(content)
    if complaint is not None:
        raise Damaged(f"{path}: {complaint}")
    body = json.loads(content)
    del body["seal"]
    return body


def _sealed_file(manifest: dict) -> Tuple[str, dict]:
    (name, sealed), = manifest["files"].items()
    return name, sealed


def _open_state(manifest: dict, shard: str) -> BinaryIO:
    try:
        name, sealed = _sealed_file(manifest)
        path, size = os.path.join(shard, name), sealed["size"]
    except (KeyError, TypeError, ValueError):
        raise Damaged(f"{shard}/{MANIFEST} does not name one file with its size") from None
    if os.path.basename(name) != name:
        raise Damaged(f"{shard}/{MANIFEST} names a file outside its directory: {name!r}")
    try:
        file = _open_own(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    found = os.fstat(file.fileno()).st_size
    if found != size:
        file.close()
        raise Damaged(f"{path} has {found} bytes, and its manifest says {size}")
    return file


def _open_own(path: str) -> BinaryIO:
    """Opens a regular file that this user owns: unpickling a state runs code that the file names."""
    try:
        file = open(path, "rb", buffering=1 << 20, opener=_without_following)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(error.errno, os.strerror(error.errno), path) from None
        raise Damaged(f"{path} cannot be opened: {os.strerror(error.errno)}") from None
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return file
    file.close()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path} is not a regular file")
    raise Damaged(f"{path} belongs to uid {found.st_uid} and this process is uid {os.geteuid()}; it is not loaded")


def _without_following(path: str, flags: int) -> int:
    # Does not follow a symbolic link, and does not wait for the other end of a FIFO.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def clear_aside(directory: str, rank: int) -> None:
    """Removes unfinished shards of this rank and unfinished removals of processes that no longer exist."""
    _clear(directory, ".step-")
    for step in steps(directory):
        _clear(step_directory(directory, step), f".rank-{rank:05d}.")


def _clear(directory: str, prefix: str) -> None:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        match = _ASIDE.fullmatch(name)
        if match and name.startswith(prefix) and _is_gone(match[1]):
            _clean(_disk.remove_tree, os.path.join(directory, name))


def _is_gone(owner: str) -> bool:
    """Whether the process that made a temporary file is gone. ``owner`` is of its name: see :func:`_disk.aside`."""
    pid, *more = owner.split("-")
    place, since = more if len(more) == 2 else (None, None)
    try:
        if place is not None and place != _disk.place():
            # It may live in another container or on another host. No process writes one file for a day.
            return int(since, 16) / 1e9 + 24 * 3600 < time.time()
        if int(pid) == os.getpid():
            return True  # This process is not writing now, because it saves one shard at a time.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        pass
    return False


def prune(directory: str, world_size: int, keep: int, counts: Callable = lambda _step: True) -> None:
    """Removes steps older than the `keep` newest that look whole and count. Removes none if fewer than `keep` do."""
    whole = [step for step in steps(directory) if looks_whole(directory, step, world_size) and counts(step)]
    if len(whole) < keep:
        return
    for step in steps(directory):
        if step < whole[keep - 1]:
            _remove_step(directory, step)


def _remove_step(directory: str, step: int) -> None:
    # Renamed first, atomically, so that an interrupted removal leaves no partial step.
    aside = os.path.join(directory, _disk.aside(f"step-{step:012d}"))
    try:
        _disk.do(os.rename, step_directory(directory, step), aside)
    except FileNotFoundError:
        return  # Another rank was faster.
    _disk.remove_tree(aside)
