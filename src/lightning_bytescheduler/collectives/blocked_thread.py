"""Whether a thread waits inside a collective of the default process group; read off its stack, from another thread.

That costs the watched thread nothing, and sees collectives whoever called them: Lightning, torchmetrics, the user. What
is not recognised, such as a wait for a handle of an asynchronous call, counts as not waiting. With NCCL the host hardly
ever waits inside a collective, so that little is seen there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

__all__ = ["Blocked", "blocked_in"]

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter",
)  # fmt: skip
_BEGINS_BATCH = "_broadcast_sigterm_tensor"  # Lightning's epoch loop
_DEPTH = 12  # frames that are looked at for it
_BUFFERS = "_distributed_broadcast_coalesced"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Inside of what a thread is.

    Attributes:
        collective: Its name.
        begins_batch: Whether Lightning's epoch loop calls it, before each batch.
    """

    collective: str
    begins_batch: bool


def blocked_in(thread: int) -> Blocked | None:
    """The collective of the default group that a thread is inside of, or ``None``.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
    if module == _DDP:
        return Blocked("broadcast", False) if name == _BUFFERS else None
    if module != _C10D or name not in _COLLECTIVES or not _on_default_group(frame):
        return None
    return Blocked(name, _called_from(frame, _BEGINS_BATCH))


def _on_default_group(frame: FrameType) -> bool:
    group = frame.f_locals.get("group")
    return group is None or group is dist.group.WORLD


def _called_from(frame: FrameType, name: str) -> bool:
    caller: FrameType | None = frame
    for _ in range(_DEPTH):
        caller = None if caller is None else caller.f_back
        if caller is None:
            return False
        if caller.f_code.co_name == name:
            return True
    return False
