"""A recovery policy for `mainstay run --policy mine.py`. It decides like the built-in policy until you add rules."""

from __future__ import annotations

from mainstay.policy import Case, Decision

# The built-in policy decides each failure by the first of these rules that applies:
#
# 1. Stop: ranks cannot be started, the program fails by itself before its first step, or the same error of the program
#    occurred at the same step or data. If the host may be at fault: hand back, so that another host is tried first.
# 2. Stop: a budget is used up (--max-restarts, --restart-budget), a restart has confirmed the failure, or three restarts
#    in a row brought no new step. Hand back if the host or the infrastructure is at fault.
# 3. Wait for a host that is not ready (--ready-within). Leave one that is not fit, or not ready in time: with a spare,
#    with fewer ranks, or handed back.
# 4. Restart by the action of case.job.actions that is expected to have all ranks train again soonest, by what helped
#    before (case.past, case.earlier), and after a longer and longer delay if restarts brought no progress.
#
# docs/reference/policy.md has the details, docs/howto/policy.md examples.


def decide(case: Case) -> Decision | None:
    # cause = case.verdict.cause
    # if cause.kind == "hang" and cause.hang == "network":
    #     return Decision("restart_in_job", why="the network hung; all ranks reconnect")
    return None  # the built-in policy decides
