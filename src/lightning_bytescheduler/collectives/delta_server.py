"""Asynchronous push and pull: workers push what their steps changed, servers add it to the weights they keep.

As BytePS does with BYTEPS_ENABLE_ASYNC (Jiang et al., OSDI 2020): a worker steps on its own, pushes its *delta* (its
weights less what it pulled last), and pulls the weights as they are then. Nobody's gradients are averaged, and the
weights depend on who came first: this is not exact.

How far workers get apart is bounded as in stale synchronous parallel (Ho et al., NeurIPS 2013): a worker's clock counts
its pushes since all have met last, and the answer to push ``c`` is given when the slowest clock is at least ``c``
less the staleness. So what a worker computes on has all pushes of all workers but their last ``staleness`` at least.
With 0, all wait for all.

A server adds a push as a whole and answers with weights as they are between two pushes. Each server has an equal share
of each type's elements, and keeps the same clocks, so the bound holds for all of the weights.

Why nobody waits forever: the slowest worker's push is answered at once. Who waits to meet holds nobody up. Where a
worker dies, its connection ends, and with it the server's part in the fit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.summing_server import DTYPES, abandon
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from lightning_bytescheduler.failures.messages import brief

__all__ = ["DeltaExchange", "DeltaServer"]

_BEGIN, _PUSH, _MEET, _CLOSE = range(4)  # what a worker says first; then its clock
_HEADER_TAG, _LAYOUT_TAG, _DATA_TAG = 0, 1, 2
_LARGEST = 2**36  # elements
_GOODBYE = timedelta(seconds=5)
_GOODBYES_S = 5.0
_LOOK_EVERY_S = 0.5


class DeltaServer:
    """Serves one fit; a thread for each worker.

    Args:
        group: Workers 0 to n-1, then the servers; gloo, and used by nothing else.
        workers: n.
        staleness: How many steps a worker may be ahead of the slowest one.
    """

    def __init__(self, group: dist.ProcessGroup, *, workers: int, staleness: int) -> None:
        self._group = group
        self._workers = workers
        self._staleness = staleness
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._layout: tuple[int, ...] = ()
        self._weights: list[torch.Tensor] = []
        self._clocks: list[float] = [0.0] * workers
        self._meeting: set[int] = set()
        self._meetings = 0
        self._at_meeting: tuple[int, list[torch.Tensor]] = (-1, [])
        self._waiting: dict[int, float] = {}  # for others, and since when
        self._left = 0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=partial(self._guarded, rank), name=f"bytescheduler-deltas-{rank}", daemon=True)
            for rank in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waits_for(self) -> tuple[tuple[int, ...], float]:
        """Workers that the longest waiting one waits for, and for how many seconds it has."""
        with self._changed:
            if not self._waiting:
                return (), 0.0
            if self._meeting:
                behind = [rank for rank in range(self._workers) if rank not in self._meeting]
            else:
                behind = [rank for rank, clock in enumerate(self._clocks) if clock == min(self._clocks)]
            return tuple(behind), time.monotonic() - min(self._waiting.values())

    def wait(self, gone: Callable[[], bool]) -> None:
        """Wait until all workers have said that nothing more comes.

        Args:
            gone: Whether the rendezvous store is gone, and the run with it.

        Raises:
            RankFailedError: If a worker has died.
            UnsupportedError: If a worker has sent what does not fit.
        """
        while not self._over.wait(0.2):
            if gone() and not self._over.wait(_GOODBYES_S):
                self._fail(RankFailedError(0, "the rendezvous store of the training is gone"))
        if self._failure is not None:
            abandon(self._group)
            raise self._failure
        for thread in self._threads:
            thread.join(5.0)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._over.is_set():
                return
            self._failure = error
            self._over.set()
            self._changed.notify_all()

    def _guarded(self, rank: int) -> None:
        try:
            self._serve(rank)
        except RuntimeError as error:
            failed = RankFailedError(rank, f"its connection to this parameter server has ended; {brief(error)}")
            failed.__cause__ = error
            self._fail(failed)
        except BaseException as error:
            self._fail(error)

    def _serve(self, rank: int) -> None:
        begun = False
        while True:
            kind, clock = self._receive(torch.zeros(2, dtype=torch.int64), rank, _HEADER_TAG).tolist()
            if kind == _CLOSE:
                break
            if (kind == _BEGIN) == begun or kind not in (_BEGIN, _PUSH, _MEET):
                raise UnsupportedError(f"Rank {rank} has sent a message of kind {kind} where none such is expected.")
            goes_on = True
            if kind == _BEGIN:
                begun = True
                self._begin(rank)
            elif kind == _PUSH:
                goes_on = self._add(rank, clock)
            else:
                goes_on = self._meet(rank)
            if not goes_on:
                return
        with self._changed:
            self._clocks[rank] = math.inf  # holds nobody up any more
            self._left += 1
            if self._left == self._workers:
                self._over.set()
            self._changed.notify_all()

    def _begin(self, rank: int) -> None:
        """All say what they have; the first one says what the weights are."""
        layout = tuple(self._receive(torch.zeros(len(DTYPES), dtype=torch.int64), rank, _LAYOUT_TAG).tolist())
        if not all(0 <= elements <= _LARGEST for elements in layout):
            raise UnsupportedError(f"Rank {rank} announces weights of {layout} elements.")
        with self._changed:
            known, self._layout = self._layout or layout, self._layout or layout
        if known != layout:
            raise UnsupportedError(
                f"Rank {rank} has weights of {layout} elements by type, and another rank of {known}. All ranks need "
                "the same model."
            )
        if rank == 0:
            weights = self._receive_all(rank)
            with self._changed:
                self._weights = weights

    def _add(self, rank: int, clock: int) -> bool:
        deltas = self._receive_all(rank)
        with self._changed:
            if clock != self._clocks[rank] + 1 or not self._weights:
                raise UnsupportedError(f"Rank {rank} pushes step {clock} after step {self._clocks[rank]:.0f}.")
            for weight, delta in zip(self._weights, deltas, strict=True):
                weight.add_(delta)
            self._clocks[rank] = clock
            self._changed.notify_all()
            near = self._await(rank, lambda: min(self._clocks) >= clock - self._staleness)
            now = [weight.clone() for weight in self._weights]
        return near and self._answer(rank, now)

    def _meet(self, rank: int) -> bool:
        with self._changed:
            meeting = self._meetings
            self._meeting.add(rank)
            self._clocks[rank] = math.inf
            if len(self._meeting) == self._workers:
                self._meetings += 1
                self._meeting.clear()
                self._clocks = [0.0] * self._workers
            self._changed.notify_all()
            met = self._await(rank, lambda: self._meetings > meeting)
            # Whoever goes on pushes only when it has had its answer, but others may have had theirs before.
            now = self._kept(meeting)
        return met and self._answer(rank, now)

    def _kept(self, meeting: int) -> list[torch.Tensor]:
        """The weights that all have met with: the same for all, however fast one of them goes on."""
        if self._at_meeting[0] != meeting:
            self._at_meeting = meeting, [weight.clone() for weight in self._weights]
        return self._at_meeting[1]

    def _await(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Wait for it, under the condition; returns whether the fit still goes on."""
        if not ready():
            self._waiting[rank] = time.monotonic()
        while not ready() and self._failure is None:
            self._changed.wait(_LOOK_EVERY_S)
        self._waiting.pop(rank, None)
        return self._failure is None

    def _answer(self, rank: int, weights: Sequence[torch.Tensor]) -> bool:
        for work in [self._group.send([one], rank, _DATA_TAG + kind) for kind, one in enumerate(weights)]:
            work.wait(PATIENCE)
        return True

    def _receive_all(self, rank: int) -> list[torch.Tensor]:
        with self._changed:
            layout = self._layout
        made = [torch.empty(n, dtype=dtype) for n, dtype in zip(layout, DTYPES, strict=True) if n]
        works = [self._group.recv([one], rank, _DATA_TAG + kind) for kind, one in enumerate(made)]
        for work in works:
            work.wait(PATIENCE)
        return made

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
        self._group.recv([tensor], rank, tag).wait(PATIENCE)
        return tensor


class DeltaExchange:
    """A worker's side; one thread at a time calls it.

    Args:
        group: Workers 0 to n-1, then the servers; gloo, and used by nothing else.
        workers: n.
        servers: k, at least 1.
        weights: One flat tensor of each type, on a CPU; filled with the first rank's.
        timeout: Longest wait for an answer.

    Raises:
        RuntimeError: If a connection has ended, or an answer did not come in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        workers: int,
        servers: int,
        weights: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> None:
        self._group = group
        self._timeout = timeout
        self._servers = range(workers, workers + servers)
        self._pulled = [one.clone() for one in sorted(weights, key=lambda one: DTYPES.index(one.dtype))]
        self._clock = 0
        cuts = [one.tensor_split(servers) for one in self._pulled]
        self._shares = [[cut[number] for cut in cuts if cut[number].numel()] for number in range(servers)]
        works = []
        for server, share in zip(self._servers, self._shares, strict=True):
            have = {one.dtype: one.numel() for one in share}
            layout = torch.tensor([have.get(dtype, 0) for dtype in DTYPES], device="cpu")
            works += [self._say(server, _BEGIN), self._group.send([layout], server, _LAYOUT_TAG)]
            if group.rank() == 0:
                works += self._send(server, share)
        self._end(works)
        self.meet()

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """As pulled last, in the order of ``DTYPES``."""
        return self._pulled

    def push_pull(self, weights: Sequence[torch.Tensor]) -> None:
        """Push what has changed since the last pull, and pull; waits while too far ahead of the slowest worker.

        Args:
            weights: As a step has left them, in the order of :attr:`weights`; they come to be what was pulled.
        """
        self._clock += 1
        deltas = [now - pulled for now, pulled in zip(weights, self._pulled, strict=True)]
        cuts = [one.tensor_split(len(self._shares)) for one in deltas]
        works = []
        for number, server in enumerate(self._servers):
            works.append(self._say(server, _PUSH, self._clock))
            works += self._send(server, [cut[number] for cut in cuts if cut[number].numel()])
        self._end([*self._pull(), *works])
        for now, pulled in zip(weights, self._pulled, strict=True):
            now.copy_(pulled)

    def meet(self) -> None:
        """Wait for all other workers to do so, and pull: all have the same weights then."""
        self._clock = 0
        works = [self._say(server, _MEET) for server in self._servers]
        self._end([*self._pull(), *works])

    def close(self, *, idle: bool) -> None:
        """Tell the servers that no more comes from here; bounded.

        Args:
            idle: Whether everything has arrived. If not, connections are broken, which tells the servers as well.
        """
        if idle:
            try:
                for work in [self._say(server, _CLOSE) for server in self._servers]:
                    work.wait(_GOODBYE)
                return
            except RuntimeError:  # a server is gone; nothing of this fit depends on it any more
                pass
        abandon(self._group)

    def _say(self, server: int, kind: int, clock: int = 0) -> dist.Work:
        return self._group.send([torch.tensor([kind, clock], device="cpu")], server, _HEADER_TAG)

    def _send(self, server: int, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        return [self._group.send([one], server, _DATA_TAG + kind) for kind, one in enumerate(tensors)]

    def _pull(self) -> list[dist.Work]:
        return [
            self._group.recv([one], server, _DATA_TAG + kind)
            for server, share in zip(self._servers, self._shares, strict=True)
            for kind, one in enumerate(share)
        ]

    def _end(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)
