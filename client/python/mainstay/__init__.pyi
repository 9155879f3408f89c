from typing import Any, Callable, Optional, SupportsIndex, TypedDict, TypeVar

from . import checkpoint as checkpoint
from ._native import active as active, beat as beat, pause as pause, resume as resume
from ._native import on_save_request as on_save_request
from ._native import save_requested as save_requested, save_within as save_within
from ._native import section as section, step as step

_F = TypeVar("_F", bound=Callable[..., Any])

class expect_long:
    def __init__(self, what: str, *, seconds: Optional[float] = 3600.0) -> None: ...
    def __enter__(self) -> expect_long: ...
    def __exit__(self, *exception: Any) -> None: ...
    def __call__(self, function: _F, /) -> _F: ...

__version__: str
__all__ = [
    "__version__", "active", "beat", "checkpoint", "digest", "expect_long", "on_save_request", "pause", "report_digest", "resume",
    "save_requested", "save_within", "section", "status", "step",
]

class _Status(TypedDict):
    active: bool
    page: Optional[str]
    refusal: Optional[str]

def status() -> _Status: ...
def digest(tensors: Any) -> SupportsIndex: ...
def report_digest(tensors: Any, *, every: int = 100) -> Any: ...
