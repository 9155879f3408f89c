from typing import Optional, TypedDict

from . import checkpoint as checkpoint
from ._native import active as active, beat as beat, section as section, step as step

__version__: str
__all__ = ["__version__", "active", "beat", "checkpoint", "section", "status", "step"]

class _Status(TypedDict):
    active: bool
    page: Optional[str]
    refusal: Optional[str]

def status() -> _Status: ...
