from typing import Optional, TypedDict

from . import checkpoint as checkpoint
from ._native import active as active, beat as beat, expect_long as expect_long, pause as pause, resume as resume
from ._native import section as section, step as step

__version__: str
__all__ = [
    "__version__", "active", "beat", "checkpoint", "expect_long", "pause", "resume", "section", "status", "step",
]

class _Status(TypedDict):
    active: bool
    page: Optional[str]
    refusal: Optional[str]

def status() -> _Status: ...
