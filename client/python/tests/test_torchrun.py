"""``torchrun --rdzv-backend mainstay`` on a real etcd: PyTorch's contract of rendezvous handlers, and stock torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked_ranks import free_port

pytest.importorskip("torch.distributed.elastic.rendezvous.registry")

from torch.distributed.elastic.rendezvous import api, registry  # noqa: E402

import mainstay_torchrun as _torchrun  # noqa: E402


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd (Debian: etcd-server)")
    directory = tmp_path_factory.mktemp("etcd")
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            ["etcd", "--data-dir", str(directory / "data"), "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
            stdout=log, stderr=log,
        )
    yield client
    process.kill()
    process.wait()


@pytest.fixture
def hosts(etcd, request):
    """A function that makes the handler of one host, as torchrun does. The first endpoint has no etcd."""
    made = []

    def host(fewest=2, most=2, **conf):
        number = len(made)
        params = api.RendezvousParameters(
            backend="mainstay", endpoint=f"127.0.0.1:1,{etcd}", run_id=request.node.name, min_nodes=fewest,
            max_nodes=most, local_addr=f"127.0.0.{12 - number}", **{"join_timeout": "60", **conf},
        )
        made.append(registry.get_rendezvous_handler(params))
        return made[-1]

    yield host
    for handler in made:
        lose(handler)


@pytest.fixture
def start():
    """A function that calls another on a thread."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def lose(handler):
    """Stops the renewal of the lease, as if the host had lost its power."""
    handler._stop.set()


def until(condition):
    while not condition():
        time.sleep(0.05)


def rounds(start, *handlers):
    return [call.result() for call in [start(handler.next_rendezvous) for handler in handlers]]


def test_all_hosts_join_with_one_store_and_ranks_in_the_order_of_their_addresses(hosts, start):
    handlers = [hosts(3, 3) for _ in range(3)]
    infos = rounds(start, *handlers)
    # 127.0.0.12, 127.0.0.11, 127.0.0.10
    assert [info.rank for info in infos] == [2, 1, 0]
    assert {info.world_size for info in infos} == {3}
    assert len({str(info.bootstrap_store_info) for info in infos}) == 1
    infos[0].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"
    assert {handler.get_backend() for handler in handlers} == {"mainstay"}
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
    assert handlers[0].use_agent_store


def test_ranks_have_a_store_of_their_own_where_pytorch_is_told_so(hosts, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = hosts(1, 1)
    info = handler.next_rendezvous()
    assert not handler.use_agent_store
    assert info.bootstrap_store_info.master_port != info.store.port


def test_a_spare_takes_the_rank_of_a_lost_host_and_the_others_keep_theirs(hosts, start):
    first, second = hosts(), hosts()
    before = rounds(start, first, second)
    assert [info.rank for info in before] == [1, 0]
    spare = hosts()
    waits = start(spare.next_rendezvous)
    until(lambda: len(first._seen.hosts) == 3)
    # It does not disturb a job that is complete.
    assert first.num_nodes_waiting() == 0
    # The host of rank 0 has the store of the round.
    lose(second)
    until(first.num_nodes_waiting)
    after = rounds(start, first)[0]
    assert (after.rank, after.world_size, waits.result().rank) == (1, 2, 0)
    after.store.set("key", "again")
    assert waits.result().store.get("key") == b"again"


def test_a_job_goes_on_with_fewer_hosts_and_takes_new_ones(hosts, start):
    first, second = hosts(1, 2), hosts(1, 2)
    rounds(start, first, second)
    lose(second)
    until(first.num_nodes_waiting)
    alone = first.next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1)
    third = hosts(1, 2)
    joins = start(third.next_rendezvous)
    until(first.num_nodes_waiting)
    again = first.next_rendezvous()
    assert (again.rank, joins.result().rank, again.world_size) == (0, 1, 2)


def test_hosts_restart_with_one_that_restarts_its_ranks(hosts, start):
    first, second = hosts(), hosts()
    rounds(start, first, second)
    restarts = start(first.next_rendezvous)
    until(second.num_nodes_waiting)
    assert second.next_rendezvous().rank == 0
    assert restarts.result().rank == 1


def test_a_host_that_was_taken_for_lost_comes_back(hosts, start):
    first, second = hosts(1, 2), hosts(1, 2)
    rounds(start, first, second)
    second._leave()
    until(first.num_nodes_waiting)
    assert first.next_rendezvous().world_size == 1
    second._look()
    assert second.num_nodes_waiting() == 1
    joins = start(second.next_rendezvous)
    until(first.num_nodes_waiting)
    assert (first.next_rendezvous().rank, joins.result().rank) == (0, 1)


def test_the_first_round_waits_for_more_hosts_than_the_fewest(hosts, start):
    one = hosts(1, 2, last_call_timeout="1").next_rendezvous()
    assert one.world_size == 1


def test_a_closed_rendezvous_lets_nobody_in_and_spares_end_well(hosts, start):
    first, second, spare = hosts(), hosts(), hosts()
    rounds(start, first, second)
    waits = start(spare.next_rendezvous)
    until(lambda: len(first._seen.hosts) == 3)
    assert not first.is_closed()
    first.set_closed()
    assert second.is_closed()
    with pytest.raises(api.RendezvousClosedError):
        hosts().next_rendezvous()
    assert isinstance(waits.exception(), SystemExit) and waits.exception().code == 0
    ends = [start(handler.shutdown) for handler in (first, second)]
    assert [end.result() for end in ends] == [True, True]


def test_a_job_leaves_nothing_behind_and_its_id_can_be_used_again(hosts, start):
    for _ in range(2):
        pair = hosts(), hosts()
        rounds(start, *pair)
        assert all(end.result() for end in [start(handler.shutdown) for handler in pair])
        assert not pair[0]._look().revisions


def test_what_a_job_that_was_killed_has_left_is_removed(hosts, start):
    killed = hosts(1, 1)
    killed.next_rendezvous()
    killed.set_closed()
    lose(killed)
    until(lambda: not killed._look().hosts)
    assert hosts(1, 1).next_rendezvous().rank == 0


def test_too_few_hosts_are_a_timeout(hosts):
    handler = hosts(2, 2, join_timeout="1")
    with pytest.raises(api.RendezvousTimeoutError):
        handler.next_rendezvous()
    assert not handler._look().hosts


def test_an_etcd_that_is_away_is_a_connection_error(monkeypatch):
    monkeypatch.setattr(_torchrun, "_CALL_S", 0.1)
    params = api.RendezvousParameters("mainstay", f"127.0.0.1:{free_port()}", "job", 1, 1)
    handler = registry.get_rendezvous_handler(params)
    with pytest.raises(api.RendezvousConnectionError):
        handler.next_rendezvous()
    assert not handler.shutdown()


@pytest.mark.parametrize("endpoint", ["", ",", "ftp://host:1", "host/path"])
def test_wrong_endpoints_are_refused(endpoint):
    with pytest.raises(ValueError, match="--rdzv-endpoint"):
        registry.get_rendezvous_handler(api.RendezvousParameters("mainstay", endpoint, "job", 1, 1))


def test_survivors_keep_their_ranks_where_the_job_shrinks():
    hosts = {name: _torchrun._Host(f"node{name}", 0) for name in ("2", "10", "30")}
    assert _torchrun._by_rank([], hosts, 3) == ["2", "10", "30"]
    assert _torchrun._by_rank(["a", "30", "10"], hosts, 3) == ["2", "30", "10"]
    del hosts["2"]
    assert _torchrun._by_rank(["a", "10", "30"], hosts, 2) == ["30", "10"]


SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
marks = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
while not (marks / "end").exists():
    total = torch.ones(1)
    dist.all_reduce(total)
    if int(total) == world:
        (marks / f"{world}.{rank}").write_text(sys.argv[2])
    time.sleep(0.1)
"""


def test_a_job_of_stock_torchrun_loses_the_host_of_rank_0_and_goes_on(etcd, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launchers = []
    for host in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=mainstay", f"--rdzv-endpoint={etcd}", "--rdzv-id=stock", "--local-addr=127.0.0.1",
            # A launcher that is killed leaves its logs behind.
            f"--log-dir={tmp_path / 'logs'}", str(script), str(tmp_path), str(host),
        ]
        with open(tmp_path / f"output.{host}", "wb") as output:
            launchers.append(subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output))

    def trained(mark):
        assert all(launcher.poll() is None for launcher in launchers), outputs(tmp_path)
        return mark.exists() and mark.read_text()

    until(lambda: trained(tmp_path / "2.0") and trained(tmp_path / "2.1"))
    victim = launchers.pop(int(trained(tmp_path / "2.0")))
    # A host takes its ranks along.
    for pid in [*children(victim.pid), victim.pid]:
        os.kill(pid, signal.SIGKILL)
    victim.wait()
    until(lambda: trained(tmp_path / "1.0"))
    (tmp_path / "end").touch()
    assert launchers[0].wait() == 0, outputs(tmp_path)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(child) for child in listed.read().split()]


def outputs(directory):
    return "".join(path.read_text(errors="replace") for path in sorted(directory.glob("output.*")))
