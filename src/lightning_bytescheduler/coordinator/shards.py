"""The shards of a coordinator: processes that look at updates, add them up and encode their mean, each its own pieces.

Pieces are dealt out to the shards in turn; as they have the same size, each shard has the same bytes, to one piece. The
one process with the port takes part in the protocol, receives and sends; updates and means lie in memory that all of
them have mapped, so that nothing of them is copied between processes. What one shard does depends on no other, so the
number of shards changes no bit.

Why the coordinator's own process keeps the port: one port then goes through firewalls, TLS, tokens and limits are in
one place, workers need to know nothing, and whether an update counts is one decision of one event loop. Work on numbers
is what is spread, as it costs several times what moving them does. What a shard holds is gone with a round: the run's
state is the coordinator's alone, and a shard that is killed at any moment can leave nothing half applied. It is started
again and asked again: nothing that it was asked for changes what it was made of. Only sums in fixed point, in which
many updates are once their bytes would take more memory, are in its memory alone. If some are lost with it, the
coordinator ends and says so, and goes on from its last state when it is started again, as if it had been killed itself.

Each shard has a thread, ``bytescheduler-shard-N``, which alone talks to its process; no lock is held meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from torch import Tensor

from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.piece_sums import Addend, MeanPlace
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.coordinator.shard_process import (
    Add,
    Answer,
    Clear,
    Encode,
    Form,
    Look,
    Request,
    Share,
    Work,
    receive,
    send,
)
from lightning_bytescheduler.coordinator.shared_memory import SharedBuffers
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["Shards"]

log = logging.getLogger(__name__)

_PROCESS = "lightning_bytescheduler.coordinator.shard_process"
_LONGEST_S = 300.0  # of one piece of work, then its shard is stuck
_END_S = 5.0


class Shards:
    """So many processes, which end with this one however that ends.

    Args:
        count: 1 or more.
        on_restart: Called from any thread when one was started again.
        on_lost: Called from any thread with the error when sums were lost with one.

    Raises:
        UnsupportedError: Where descriptors cannot be handed over, as on Windows.
    """

    def __init__(
        self,
        count: int,
        *,
        on_restart: Callable[[], object] = lambda: None,
        on_lost: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        if not hasattr(socket, "send_fds"):
            raise UnsupportedError("Shards of a coordinator need Linux or macOS: use --shards 1 here.")
        self.buffers = SharedBuffers()
        self._sums = itertools.count(1)
        self._runs = False
        self._shards = [_Shard(number + 1, self.buffers, on_restart, on_lost) for number in range(count)]

    def start(self) -> None:
        """Start them; returns at once, and what they are asked for waits until they are there."""
        for shard in self._shards:
            shard.start()
        self._runs = True

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [shard.process_id for shard in self._shards]

    def serves(self, pieced: PiecedFormat) -> bool:
        """Whether payloads of a format are shared: of small ones, asking costs more than the work."""
        return self.buffers.reuses(min(pieced.payload_bytes, pieced.of_means.payload_bytes))

    def look(self) -> None:
        """Start those again that were killed while they had nothing to do; returns at once."""
        for shard in self._shards if self._runs else ():
            shard.look()

    def close(self) -> None:
        """End them. May be repeated."""
        for shard in self._shards if self._runs else ():
            shard.close()
        self._runs = False

    async def extents(self, pieced: PiecedFormat, payload: Tensor, indices: Sequence[int]) -> list[Extent]:
        """The extents of some pieces of a payload; see ``PiecedFormat.extent``."""
        form, number = _form(pieced), self.buffers.shared(payload).number
        works = [(shard, Look(form=form, payload=number, pieces=mine)) for shard, mine in self._dealt(indices) if mine]
        answers = await asyncio.gather(*(shard.ask(work, [payload]) for shard, work in works))
        found: dict[int, Extent] = {}
        for (_, work), answer in zip(works, answers, strict=True):
            found.update(zip(work.pieces, answer.extents, strict=True))
        return [found[index] for index in indices]

    def sums_of(self, pieced: PiecedFormat) -> _ShardSums:
        """Who adds up updates of a format for which :meth:`serves` holds."""
        sums = _ShardSums(self, pieced, next(self._sums))
        weakref.finalize(sums, self._drop, sums.number).atexit = False
        return sums

    def _drop(self, number: int) -> None:
        for shard in self._shards:
            shard.dropped.append(number)

    def _dealt(self, indices: Sequence[int]) -> list[tuple[_Shard, tuple[int, ...]]]:
        count = len(self._shards)
        return [
            (shard, tuple(index for index in indices if index % count == number))
            for number, shard in enumerate(self._shards)
        ]


class _ShardSums:
    """A sum of updates in the shards; a ``Summation``.

    Args:
        shards: That work.
        pieced: The format of the updates.
        number: Of the sum.
    """

    def __init__(self, shards: Shards, pieced: PiecedFormat, number: int) -> None:
        self.number = number
        self._shards = shards
        self._pieced = pieced
        self._form = _form(pieced)

    async def add(self, updates: Sequence[Addend]) -> None:
        await self._of_all(
            lambda pieces: Add(form=self._form, sum=self.number, updates=self._shares(updates), pieces=pieces),
            [update.payload for update in updates],
        )

    async def encode(self, held: Sequence[Addend], place: MeanPlace) -> None:
        shared = self._shards.buffers.shared
        residuals = [tensor for tensor in (place.known, place.lost) if tensor is not None]

        def work(pieces: tuple[int, ...]) -> Encode:
            return Encode(
                form=self._form,
                sum=self.number,
                updates=self._shares(held, pieces),
                pieces=pieces,
                payload=shared(place.payload).number,
                round=place.round,
                known=None if place.known is None or place.lost is None else shared(place.known).number,
                lost=None if place.lost is None else shared(place.lost).number,
            )

        await self._of_all(work, [place.payload, *residuals, *(one.payload for one in held)])

    async def clear(self) -> None:
        await self._of_all(lambda pieces: Clear(sum=self.number, pieces=pieces), [])

    def _shares(self, updates: Sequence[Addend], pieces: Sequence[int] = ()) -> tuple[Share, ...]:
        shared = self._shards.buffers.shared
        return tuple(
            Share(
                payload=shared(one.payload).number,
                weight=one.weight,
                extents=tuple(one.extents[index] for index in pieces),
            )
            for one in updates
        )

    async def _of_all(self, work: Callable[[tuple[int, ...]], Work], tensors: Sequence[Tensor]) -> None:
        dealt = self._shards._dealt(range(len(self._pieced.pieces)))
        # All are waited for: nobody is to use what one of them still writes to.
        done = await asyncio.gather(
            *(shard.ask(work(pieces), tensors) for shard, pieces in dealt if pieces),
            return_exceptions=True,
        )
        for one in done:
            if isinstance(one, BaseException):
                raise one


class _Shard:
    """One process, and the thread that talks to it."""

    def __init__(
        self,
        number: int,
        buffers: SharedBuffers,
        on_restart: Callable[[], object],
        on_lost: Callable[[BaseException], object],
    ) -> None:
        self._number = number
        self._buffers = buffers
        self._on_restart = on_restart
        self._on_lost = on_lost
        self._gone: deque[int] = deque()  # buffers
        self.dropped: deque[int] = deque()  # sums
        buffers.gone.append(self._gone)
        self._known: set[int] = set()  # buffers that the process has mapped
        self._filled: set[int] = set()  # sums that are not of nothing, in its memory alone
        self._has_failed = False
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._closed = False
        self._place = threading.Lock()  # of what is there to be ended; nothing else is waited for under it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bytescheduler-shard-{number}")
        self._process: subprocess.Popen[bytes]
        self._channel: socket.socket

    @property
    def process_id(self) -> int:
        return self._process.pid

    def start(self) -> None:
        with self._place:
            if self._closed:  # whoever ends shards has seen the one before, and would not see this one
                raise ChildProcessError("The coordinator stops.")
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as failing:
                failing.callback(ours.close)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _PROCESS, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl+C is for the coordinator
                )
                failing.pop_all()
            ours.settimeout(_LONGEST_S)
            self._channel = ours
        self._known = set()

    async def ask(self, work: Work, tensors: Sequence[Tensor]) -> Answer:
        """Have something done, once more if the process was killed.

        Args:
            work: That.
            tensors: Buffers that it names: they stay as long as it is done.

        Raises:
            ChildProcessError: If the process was killed, and sums with it; or the second one, too.
            RuntimeError: If it failed; has the words of the process.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, work, tensors)

    def look(self) -> None:
        if self._process.poll() is not None and not self._closed:
            self._thread.submit(self._look)

    def _look(self) -> None:
        if self._process.poll() is None or self._closed or self._has_failed:
            return
        with contextlib.suppress(ChildProcessError):  # said already
            self._restart()

    def _ask(self, work: Work, tensors: Sequence[Tensor]) -> Answer:
        if isinstance(work, Clear):
            self._filled.discard(work.sum)
        try:
            for again in (False, True):
                try:
                    return self._once(work, tensors)
                except OSError as error:
                    if self._closed:
                        raise ChildProcessError("The coordinator stops.") from error
                    if again:
                        break
                    self._restart()  # what a killed one had of this went with it, and is done anew
            raise ChildProcessError(f"{self._ended()} although it was started again for this.")
        finally:
            if isinstance(work, Add):
                self._filled.add(work.sum)  # if it has failed, a part of it may be there

    def _ended(self) -> str:
        """How the process has ended, in words."""
        self._process.kill()  # one that is stuck: it is not to write to what others may get
        code = self._process.wait(_END_S)
        how = f"has ended with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"Shard {self._number} (process {self._process.pid}) {how}"

    def _restart(self) -> None:
        what = self._ended()
        if self._filled.difference(self.dropped):
            self._has_failed = True
            lost = ChildProcessError(
                f"{what}, and sums of the round that is on with it. Start the coordinator again: with --state it goes "
                "on from its last round."
            )
            self._on_lost(lost)
            raise lost
        self._channel.close()
        log.warning("%s. It is started again, and nothing is lost.", what)
        self.start()
        self._on_restart()

    def _once(self, work: Work, tensors: Sequence[Tensor]) -> Answer:
        shared = {(buffer := self._buffers.shared(tensor)).number: buffer for tensor in tensors}
        opened = [buffer for number, buffer in shared.items() if number not in self._known]
        closed, dropped = self._known.intersection(_taken(self._gone)), _taken(self.dropped)
        self._filled.difference_update(dropped)
        request = Request(
            work=work,
            opened=tuple((buffer.number, buffer.length) for buffer in opened),
            closed=tuple(closed),
            dropped=tuple(dropped),
        )
        send(self._channel, request, [buffer.file for buffer in opened])
        self._known = (self._known | shared.keys()) - closed
        body, _ = receive(self._channel)
        answer = self._decoder.decode(body)
        if answer.error is not None:
            raise RuntimeError(f"Shard {self._number} has failed: {answer.error}")
        return answer

    def close(self) -> None:
        with self._place:
            if self._closed:
                return
            self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        try:
            self._channel.shutdown(socket.SHUT_RDWR)  # it ends, and nobody waits for it any more
        except OSError:
            log.debug("Shard %d had gone before.", self._number)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._thread.shutdown()  # what it was at has ended with the process
        self._channel.close()


def _taken(numbers: deque[int]) -> list[int]:
    """All of them, also while others are added."""
    return [numbers.popleft() for _ in range(len(numbers))]


def _form(pieced: PiecedFormat) -> Form:
    wire = pieced.wire
    return Form(dtype=wire.dtype, density=wire.density, elements=pieced.elements, piece=pieced.piece)
