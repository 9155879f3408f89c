"""The rendezvous of stock torchrun: ``torchrun --rdzv-backend mainstay --rdzv-endpoint HOST[:PORT][,...]``.

Hosts meet in etcd (3.4 or later), through its JSON gateway. Each host has a key that a lease removes when the host is
lost, so no clock is compared with that of another host. A round is one key with the hosts in the order of their ranks,
which the first host that sees all preconditions writes by compare-and-swap. Hosts keep their ranks from round to
round, and a host that waits takes the place of a lost one. The store of a round is a TCPStore in the torchrun of rank
0: a new one for each round, so the job survives the loss of any host.

PyTorch imports this module together with torch.distributed, in each process. It is outside the package so that this does
not import Mainstay's client, which a process must do after its fork from a template.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Optional

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

_log = logging.getLogger(__name__)

_NAME = "mainstay"
#: A host is lost when its lease has not been renewed for so long. etcd takes up to 0.5 s more to notice.
_LEASE_S = 2
_BEAT_S = 0.5
#: How often a host that waits for a round looks.
_POLL_S = 0.2
#: One try at one endpoint; a call goes round the endpoints until it has taken _CALL_S.
_TRY_S = 0.7
_CALL_S = 10.0
#: Longer than a lost host has its key. Then PyTorch's timeout for a store.
_CONNECT = timedelta(seconds=10)
_STORE = timedelta(seconds=300)
#: How long the host of the store waits for the others to leave before it ends.
_LEAVE_S = 3.0


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point of the group ``torchrun.handlers``."""
    return Rendezvous


class Rendezvous(RendezvousHandler):
    """One host in the rendezvous of a job.

    Of ``--rdzv-conf`` it takes PyTorch's ``join_timeout`` (600 s) and ``last_call_timeout`` (30 s: how long the first
    round waits for more hosts than the fewest), and ``cacert``, ``cert`` and ``key`` for https endpoints.
    """

    def __init__(self, params: RendezvousParameters):
        self._params = params
        self._join_s = _seconds(params, "join_timeout", 600)
        self._last_call_s = _seconds(params, "last_call_timeout", 30)
        self._etcd = _Etcd(params)
        self._prefix = f"/mainstay/v1/torchrun/{urllib.parse.quote(params.run_id, safe='')}/"
        self._id = uuid.uuid4().hex
        self._addr = params.local_addr or socket.getfqdn()
        self._lease = ""
        #: The round that this host takes part in.
        self._round: Optional[_Round] = None
        #: The lowest round that this host can join.
        self._wants = 0
        self._server: Optional[dist.TCPStore] = None
        self._lock = threading.Lock()
        self._seen = _Seen()
        self._stop = threading.Event()
        self._beating: Optional[threading.Thread] = None

    def get_backend(self) -> str:
        return _NAME

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round = None
        deadline = time.monotonic() + self._join_s
        self._join()
        while True:
            deadline, found = self._await_round(deadline)
            # Ranks have ended on all hosts before a round is made, so nothing uses the store of the round before.
            self._server = None
            store = self._store_of(found, deadline)
            if store is not None:
                break
            _log.warning("round %s: a host was lost before its ranks started; waiting for the next", found.number)
            self._join()
        self._round = found
        rank = found.hosts.index(self._id)
        _log.info("round %s: rank %s of %s hosts", found.number, rank, len(found.hosts))
        place = RendezvousStoreInfo(store.host, store.port)
        if not self.use_agent_store:
            place = RendezvousStoreInfo.build(rank, store, self._addr)
        return RendezvousInfo(store, rank, len(found.hosts), place)

    def is_closed(self) -> bool:
        return self._look().closed

    def set_closed(self) -> None:
        self._put("closed", {})
        self._look()

    def num_nodes_waiting(self) -> int:
        """The number of hosts for which torchrun restarts its ranks: new ones, lost ones, and those that restart."""
        seen, current = self._seen, self._round
        if current is None or seen.closed:
            return 0
        if seen.round is None or seen.round.number != current.number or self._id not in seen.hosts:
            return 1  # The others go on without this host.
        left = sum(1 for host in current.hosts if host not in seen.hosts or seen.hosts[host].wants > current.number)
        new = sum(1 for host in seen.hosts if host not in current.hosts)
        return left + min(new, self._params.max_nodes - len(current.hosts))

    def shutdown(self) -> bool:
        """Closes the rendezvous for all hosts, as PyTorch's own do."""
        try:
            self.set_closed()
            end = time.monotonic() + (_LEAVE_S if self._server is not None else 0)
            while time.monotonic() < end and any(host != self._id for host in self._look().hosts):
                time.sleep(_POLL_S)
            self._leave()
            if not self._look().hosts:
                self._etcd.call("kv/deleterange", _prefix_range(self._prefix))
            return True
        except RendezvousConnectionError as error:
            _log.warning("the rendezvous %s could not be closed: %s", self.get_run_id(), error)
            return False
        finally:
            self._stop.set()

    def _join(self) -> None:
        """Enters the barrier before the next round."""
        seen = self._look()
        if not seen.hosts and (seen.round or seen.closed):
            # What an earlier job with this id has left.
            names = ("round", "closed")
            unchanged = [self._unchanged(name, seen.revisions.get(name, "0")) for name in names]
            removed = [{"requestDeleteRange": {"key": _text(self._prefix + name)}} for name in names]
            self._etcd.call("kv/txn", {"compare": unchanged, "success": removed})
            seen = self._look()
        if seen.closed:
            raise RendezvousClosedError(f"the rendezvous {self.get_run_id()} is closed")
        self._wants = seen.round.number + 1 if seen.round else 0
        # A new lease, since the old one may be about to end. The key moves to it.
        self._lease = self._etcd.call("lease/grant", {"TTL": _LEASE_S})["ID"]
        self._beat()
        self._put("hosts/" + self._id, {"addr": self._addr, "wants": self._wants}, self._lease)

    def _await_round(self, deadline: float) -> tuple[float, _Round]:
        """Waits until this host is in a round, and helps to make one. A spare has no deadline."""
        enough_since: Optional[float] = None
        fewest, most = self._params.min_nodes, self._params.max_nodes
        while True:
            seen = self._look()
            last, now = seen.round, time.monotonic()
            if last and last.number >= self._wants and self._id in last.hosts:
                return deadline, last
            is_spare = last is not None and len(last.hosts) == most and self._id not in last.hosts
            if seen.closed:
                self._leave()
                if is_spare:
                    # RendezvousGracefulExitError is for this, but ends torchrun 2.8 with an AttributeError.
                    _log.info("the job is done, without this host")
                    raise SystemExit(0)
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()} is closed")
            if self._id not in seen.hosts:
                self._join()
                continue
            training = seen.training()
            if is_spare and len(training) == most:
                deadline = now + self._join_s
            elif now > deadline:
                self._leave()
                raise RendezvousTimeoutError(f"{len(seen.hosts)} of at least {fewest} hosts in {self._join_s} s")
            if not training and len(seen.hosts) >= fewest:
                enough_since = enough_since or now
                goes_on = last is not None and any(host in seen.hosts for host in last.hosts)
                if len(seen.hosts) >= most or goes_on or now >= enough_since + self._last_call_s:
                    self._make(last, seen)
                    continue
            else:
                enough_since = None
            time.sleep(_POLL_S)

    def _make(self, last: Optional[_Round], seen: _Seen) -> None:
        """Writes the next round, unless another host was faster."""
        hosts = _by_rank(last.hosts if last else [], seen.hosts, self._params.max_nodes)
        made = {"round": last.number + 1 if last else 0, "hosts": hosts}
        put = {"key": _text(self._prefix + "round"), "value": _text(json.dumps(made))}
        unchanged = self._unchanged("round", seen.revisions.get("round", "0"))
        self._etcd.call("kv/txn", {"compare": [unchanged], "success": [{"requestPut": put}]})

    def _store_of(self, of: _Round, deadline: float) -> Optional[dist.TCPStore]:
        """The store of a round, or ``None`` if a host is lost before it is there."""
        if of.hosts[0] == self._id:
            self._server = dist.TCPStore(self._addr, 0, is_master=True, wait_for_workers=False)
            place = {"round": of.number, "addr": self._addr, "port": self._server.port}
            self._put("store", place, self._lease)
            return self._server
        while True:
            seen = self._look()
            if seen.store is not None and seen.store["round"] == of.number:
                addr, port = seen.store["addr"], seen.store["port"]
                try:
                    store = dist.TCPStore(addr, port, timeout=_CONNECT, wait_for_workers=False)
                    store.set_timeout(_STORE)
                    return store
                except RuntimeError as error:
                    # Its host may have been lost since.
                    if of.hosts[0] in self._look().hosts:
                        raise RendezvousConnectionError(f"the store of rank 0 at {addr}:{port}: {error}") from error
            if any(host not in seen.hosts for host in of.hosts) or seen.round != of:
                return None
            if time.monotonic() > deadline:
                self._leave()
                raise RendezvousTimeoutError(f"no store from rank 0 in {self._join_s} s")
            time.sleep(_POLL_S)

    def _look(self) -> _Seen:
        """Reads what all hosts have written, if anything has changed."""
        with self._lock:
            seen = self._seen
            asked = {**_prefix_range(self._prefix), "minModRevision": str(seen.revision + 1)}
            changed = self._etcd.call("kv/range", asked)
            # A count without the keys: a host that is gone changes it, all others change a revision.
            if changed.get("kvs") or int(changed.get("count", 0)) != len(seen.revisions):
                answer = self._etcd.call("kv/range", _prefix_range(self._prefix))
                self._seen = seen = _Seen.of(answer, self._prefix)
            return seen

    def _put(self, name: str, value: Any, lease: str = "0") -> None:
        put = {"key": _text(self._prefix + name), "value": _text(json.dumps(value)), "lease": lease}
        self._etcd.call("kv/put", put)

    def _unchanged(self, name: str, revision: str) -> dict[str, Any]:
        return {"key": _text(self._prefix + name), "target": "MOD", "modRevision": revision}

    def _leave(self) -> None:
        self._stop.set()
        lease, self._lease = self._lease, ""
        if lease:
            try:
                self._etcd.call("lease/revoke", {"ID": lease})
            except _RefusedError:
                pass  # It has ended already.

    def _beat(self) -> None:
        """Renews the lease, and reads what has changed, until it is stopped or the lease is lost."""
        self._stop.set()
        stop, lease = threading.Event(), self._lease
        self._stop = stop

        def beat() -> None:
            while not stop.wait(_BEAT_S):
                try:
                    renewed = self._etcd.call("lease/keepalive", {"ID": lease})
                    self._look()
                    if "TTL" not in renewed.get("result", {}):
                        return
                except RendezvousConnectionError as error:
                    _log.warning("%s", error)
                except RendezvousStateError:
                    _log.exception("the state of the rendezvous %s", self.get_run_id())

        self._beating = threading.Thread(target=beat, name="mainstay-rendezvous", daemon=True)
        self._beating.start()


class _Host(NamedTuple):
    addr: str
    #: The lowest round that it can join: it has left all before.
    wants: int


class _Round(NamedTuple):
    number: int
    #: In the order of their ranks.
    hosts: list[str]


class _Seen:
    """The content of etcd at one revision."""

    def __init__(self) -> None:
        self.revision = 0
        self.revisions: dict[str, str] = {}
        self.hosts: dict[str, _Host] = {}
        self.round: Optional[_Round] = None
        self.store: Optional[dict[str, Any]] = None
        self.closed = False

    def training(self) -> list[str]:
        """The hosts that have not left the last round."""
        last = self.round
        if last is None:
            return []
        return [host for host in last.hosts if host in self.hosts and self.hosts[host].wants <= last.number]

    @classmethod
    def of(cls, answer: dict[str, Any], prefix: str) -> _Seen:
        seen = cls()
        seen.revision = int(answer["header"]["revision"])
        try:
            for entry in answer.get("kvs", []):
                name = base64.b64decode(entry["key"]).decode()[len(prefix):]
                value = json.loads(base64.b64decode(entry["value"]))
                seen.revisions[name] = entry["modRevision"] if "modRevision" in entry else entry["mod_revision"]
                if name.startswith("hosts/"):
                    seen.hosts[name[len("hosts/"):]] = _Host(value["addr"], value["wants"])
                elif name == "round":
                    seen.round = _Round(value["round"], value["hosts"])
                elif name == "store":
                    seen.store = value
                elif name == "closed":
                    seen.closed = True
        except (ValueError, KeyError, TypeError) as error:
            raise RendezvousStateError(f"{prefix}: not written by this version: {error!r}") from error
        return seen


def _by_rank(before: list[str], hosts: dict[str, _Host], most: int) -> list[str]:
    """The hosts of the next round. Those of the round before keep their ranks; others get the ranks that are free."""
    kept = [host for host in before if host in hosts][:most]
    new = sorted((host for host in hosts if host not in kept), key=lambda host: (_natural(hosts[host].addr), host))
    new = new[: most - len(kept)]
    places: list[Optional[str]] = [None] * (len(kept) + len(new))
    for rank, host in enumerate(before):
        if host in kept and rank < len(places):
            places[rank] = host
    rest = iter([host for host in kept if host not in places] + new)
    return [host if host is not None else next(rest) for host in places]


def _natural(addr: str) -> list[tuple[int, str]]:
    """Orders node2 before node10."""
    parts = re.findall(r"\d+|\D+", addr)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


class _RefusedError(RendezvousConnectionError):
    """etcd has answered, but not done what was asked."""


class _Etcd:
    """etcd's API version 3 as JSON over HTTP."""

    def __init__(self, params: RendezvousParameters):
        texts = [text.strip() for text in (params.endpoint or "").split(",")]
        self._urls = [_url(text) for text in texts if text]
        if not self._urls:
            raise ValueError("--rdzv-endpoint is empty: write the endpoints of etcd, HOST[:PORT][,HOST[:PORT]...]")
        handlers: list[Any] = [urllib.request.ProxyHandler({})]
        if any(url.startswith("https:") for url in self._urls):
            context = ssl.create_default_context(cafile=params.get("cacert"))
            if params.get("cert"):
                context.load_cert_chain(params.get("cert"), params.get("key"))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)
        self._at = 0

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks one endpoint after the other. All requests of this file may be repeated."""
        data = json.dumps(body).encode()
        end = time.monotonic() + _CALL_S
        while True:
            at = self._at
            url = self._urls[at % len(self._urls)]
            request = urllib.request.Request(f"{url}/v3/{path}", data, {"Content-Type": "application/json"})
            try:
                with self._opener.open(request, timeout=_TRY_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                reason = f"{url}: {error}: {error.read(1_000).decode(errors='replace')}"
                if 400 <= error.code < 500:
                    raise _RefusedError(f"etcd refuses {path}: {reason}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"{url}: {error}"
            if time.monotonic() > end:
                raise RendezvousConnectionError(f"etcd does not answer at --rdzv-endpoint: {reason}")
            # Another thread may have turned to the next one already.
            if self._at == at:
                self._at = at + 1
            time.sleep(0.05)


def _url(text: str) -> str:
    if "://" not in text:
        text = "http://" + text
    scheme, _, place = text.partition("://")
    place = place.rstrip("/")
    if scheme not in ("http", "https") or not place or "/" in place:
        raise ValueError(f"--rdzv-endpoint {text!r}: write HOST[:PORT], http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{scheme}://{place}" if re.search(r":\d+$", place) else f"{scheme}://{place}:2379"


def _seconds(params: RendezvousParameters, key: str, default: int) -> int:
    seconds = params.get_as_int(key, default)
    if seconds is None or seconds <= 0:
        raise ValueError(f"--rdzv-conf {key}={seconds}: write a number of seconds from 1 up")
    return seconds


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _prefix_range(prefix: str) -> dict[str, str]:
    return {"key": _text(prefix), "rangeEnd": _text(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
