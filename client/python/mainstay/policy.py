"""A recovery policy of your own: what ``mainstay run --policy policy.py`` does about a failure.

    from __future__ import annotations

    from mainstay.policy import Case, Decision

    def decide(case: Case) -> Decision | None:
        if case.verdict.cause.hang == "network":
            return Decision("restart_in_job", why="the network hung; all ranks reconnect")
        return None  # the built-in policy decides

The launcher calls ``decide`` for each failure, in a process of its own. ``mainstay policy check`` tries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Optional

__all__ = [
    "Action", "Budget", "Case", "Cause", "CauseKind", "Component", "Decision", "Domain", "Experience", "Host", "Job",
    "PastFailure", "Seen", "Verdict",
]  # fmt: skip

#: What can be done about a failure, from the mildest action on. "wait": the host is not ready, ask again soon.
Action = Literal[
    "restart_in_process", "respawn_ranks", "respawn_host", "restart_in_job", "replace_host", "shrink", "hand_back",
    "stop", "wait",
]  # fmt: skip

CauseKind = Literal["exception", "exit_code", "signal", "out_of_memory", "hang", "host_lost", "start"]

#: The party that has to act.
Domain = Literal["user", "hardware", "infrastructure", "platform", "unknown"]


@dataclass(frozen=True)
class Decision:
    """What is done about a failure."""

    action: Action
    #: How long the action is delayed, in seconds, at most 3600.
    after: float = 0.0
    #: One sentence for the person on call.
    why: str = "decided by the policy"


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed. Two causes may be compared."""

    kind: CauseKind
    #: Type of the exception, of kind "exception".
    exception: Optional[str] = None
    #: Equal for the same error, of kind "exception".
    fingerprint: Optional[str] = None
    #: The exit code, of kind "exit_code".
    code: Optional[int] = None
    #: The signal, of kind "signal".
    signal: Optional[int] = None
    #: The kind of hang, of kind "hang": "network", "user_code" and others (docs/reference/journal.md).
    hang: Optional[str] = None
    #: Equal for the same hang, of kind "hang"; the host, of kind "host_lost".
    place: Optional[str] = None


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of the failure."""

    #: The number of the failure in its job, from 1.
    incident: int
    #: The attempt that failed, from 0.
    attempt: int
    #: One line for a person.
    headline: str
    cause: Cause
    domain: Domain
    #: What went wrong (docs/reference/attribution.md).
    failure_class: Optional[str]
    #: Whether the failure would repeat at the same place.
    deterministic: bool
    #: How likely the verdict is right, from 0 to 1.
    confidence: float
    #: The rank where the failure started.
    culprit: Optional[int]
    #: Ranks that ended because of the culprit.
    victims: List[int]
    #: The step that the culprit was at.
    step: Optional[int]
    #: The culprit's position in its data, if it reported one (``mainstay.data_at``).
    data: Optional[int]
    #: Whether the culprit sent heartbeats: only then does a missing step mean that it completed none.
    heartbeats: bool
    #: Whether the program cannot run at all: all ranks ended before a first step because of its source, its arguments,
    #: or a missing file or module.
    cannot_run: bool
    evidence: List[str]


@dataclass(frozen=True)
class PastFailure:
    """An earlier failure of the job. A restart followed it."""

    #: Seconds since the decision.
    ago: float
    cause: Cause
    #: The step that the culprit was at.
    step: Optional[int]
    #: As ``Verdict.data``.
    data: Optional[int]
    #: How long the attempt had run, in seconds.
    lived: float
    #: What was done.
    action: Action
    #: Newest step reached in any attempt by then.
    reached: Optional[int]
    #: As ``Case.committed``, by then.
    committed: Optional[int]
    #: Whether the culprit sent heartbeats.
    heartbeats: bool
    #: Seconds from the fault to the first step that all ranks completed again; None if they never did.
    back_after: Optional[float]


@dataclass(frozen=True)
class Experience:
    """What earlier runs of the job learned about an action."""

    cause: CauseKind
    action: Action
    #: How often it was tried; all earlier runs together count as at most 8 restarts.
    tried: float
    #: How often all ranks then completed a step.
    helped: float
    #: Seconds from the fault to that step, with the most weight on the newest; 0 if it never helped.
    seconds: float


@dataclass(frozen=True)
class Component:
    """A part of the host that is not healthy."""

    #: Such as "gpu.0000:3b:00".
    name: str
    state: Literal["HEALTHY", "UNKNOWN", "DEGRADED", "UNHEALTHY"]
    #: Why, in one line.
    reason: str
    action: Literal["NONE", "RESTART_PROCESS", "RESET_DEVICE", "REBOOT_NODE", "REPLACE_NODE", "CONTACT_SUPPORT"]
    #: How many seconds it had been in this state when the last step was completed; None without a step.
    trained_with: Optional[float]
    #: Whether the ranks themselves cause it.
    passes_with_ranks: bool


@dataclass(frozen=True)
class Host:
    """The host of the failure."""

    unhealthy: List[Component]
    #: Resources that the ranks need and that are in use, one sentence each.
    held: List[str]
    #: How many seconds this restart has waited for the host.
    waited: float
    #: How many seconds ago a step was last completed in any attempt.
    last_step_ago: Optional[float]


@dataclass(frozen=True)
class Seen:
    """Where the same error occurred before."""

    #: Other hosts on which the same program raised it before this run started.
    elsewhere: List[str]
    #: Those of them on which it was at the same step or data.
    at_this_place: List[str]
    #: How often earlier runs of this program raised it on this host, at the same step or data.
    in_earlier_runs: int
    #: Agents of other hosts that answer and receive this failure.
    answered_by: int


@dataclass(frozen=True)
class Budget:
    """How many restarts are allowed."""

    max_restarts: int
    #: The window in which restarts count, in seconds; None for the whole job.
    window: Optional[float]


@dataclass(frozen=True)
class Job:
    """What the job allows."""

    #: The possible restarts, mildest first.
    actions: List[Action]
    #: Restarts allowed (``--max-restarts``).
    max_restarts: int
    #: The window in which restarts count, in seconds (``--restart-window``); None for the whole job.
    window: Optional[float]
    #: By kind of cause (``--restart-budget``).
    budgets: Dict[CauseKind, Budget]
    #: How many seconds a restart may wait for a host that is not ready (``--ready-within``); None: not at all.
    ready_within: Optional[float]
    #: Exit status that hands the job back to the scheduler (``--hand-back-exit``).
    hand_back_exit: int


@dataclass(frozen=True)
class Case:
    """A failure, and all that is known for the decision about it."""

    verdict: Verdict
    #: The newest 1,000 failures of the job before this one, oldest first.
    past: List[PastFailure]
    earlier: List[Experience]
    #: Exit status of the culprit as a shell reports it.
    exit: int
    #: How long the attempt had run, in seconds.
    lived: float
    #: Newest step reached in any attempt.
    reached: Optional[int]
    #: Newest step saved through Mainstay; None if there is none, or if restarts resume from a later step saved elsewhere.
    committed: Optional[int]
    host: Host
    seen: Seen
    #: Hosts that could take this one's place.
    spares: int
    job: Job


def _case(values: Dict[str, Any]) -> Case:
    """The case as the launcher sends it."""
    verdict, host, job = values["verdict"], values["host"], values["job"]
    budgets = {kind: Budget(**budget) for kind, budget in job["budgets"].items()}
    return Case(**{
        **values,
        "verdict": Verdict(**{**verdict, "cause": Cause(**verdict["cause"])}),
        "past": [PastFailure(**{**past, "cause": Cause(**past["cause"])}) for past in values["past"]],
        "earlier": [Experience(**known) for known in values["earlier"]],
        "host": Host(**{**host, "unhealthy": [Component(**component) for component in host["unhealthy"]]}),
        "seen": Seen(**values["seen"]),
        "job": Job(**{**job, "budgets": budgets}),
    })
