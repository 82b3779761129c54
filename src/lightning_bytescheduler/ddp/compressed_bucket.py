"""One bucket of one step that travels encoded, part by part, to the owners of its shards or to servers, and back.

See ``compressed_reduction.py`` for what is sent, what is left out, and on which threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.host_copies import PayloadCopies
from lightning_bytescheduler.collectives.operations import StartedOperation, others_of, scale, shard_of
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.summing_server import DTYPES
from lightning_bytescheduler.compression.compressor import is_finite
from lightning_bytescheduler.ddp.encoded_pieces import (
    Piece,
    PushedPiece,
    PushedPieces,
    bodies_of,
    described,
    encoded,
    joined,
    payload_bytes,
    read,
)
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import Passage, SubCommTask

__all__ = ["CompressedBucket", "WorkObserver"]

_WIDTH = 4  # bytes of an element of a residual


class WorkObserver(Protocol):
    """Records the codecs' work."""

    def working(self, what: str, sub_task: SubCommTask) -> AbstractContextManager[list[float]]:
        """Wrap work for a part; the list collects squared norms of residuals."""


class _Compression(WorkObserver, Protocol):
    ranks: int
    failure: Callable[[], BaseException | None]

    @property
    def loss_scale(self) -> float | None:
        """The factor of losses in this step; ``None`` if it never changes."""

    def with_residual(self, piece: Piece, *, make: bool = True) -> Piece:
        """Return the piece of a whole parameter together with its residual."""


class CompressedBucket:
    """One bucket in one step; see the module.

    Args:
        weight: This rank's weight, known before anything is sent; equal weights if ``None``.
        copies: Copies payloads to and from host memory, if ``buffer`` is on a device.
        fold: How many times larger its parts are than others', see :class:`CommTask`.
    """

    def __init__(
        self,
        buffer: Tensor,
        pieces: list[Piece],
        observer: _Compression,
        weight: StepWeight | None = None,
        copies: PayloadCopies | None = None,
        fold: int = 1,
    ) -> None:
        self.fold = fold
        self._copies = copies
        self._buffer = buffer
        self._pieces = pieces
        self._observer = observer
        self._weight = weight
        self._sums: dict[int, Tensor] = {}  # by index of the part: this rank's encoded shard

    def _factor(self, ranks: int) -> float:
        """Return the factor of this rank's gradient; residuals hold gradients times this factor."""
        return 1.0 / ranks if self._weight is None else self._weight.factor

    def add_left(self) -> None:
        """Add residuals to the gradient, as the bucket is about to travel unencoded.

        Where the residual is zero, the gradient keeps its bits. Otherwise this waits until this rank's weight is known.
        A rank with weight 0 keeps its residual for a later step.
        """
        for piece in self._pieces:
            residual = piece.residual
            if residual is None:
                continue
            if piece.before is not None:
                piece.before.copy_(residual)
            if not residual.any():
                continue
            if self._weight is not None:
                self._weight.wait(self._observer.failure)
            self._add_left(piece, residual, self._factor(self._observer.ranks))

    def _add_left(self, piece: Piece, residual: Tensor, factor: float) -> None:
        gradient = self._buffer[piece.first : piece.end]
        if not factor or piece.idle or not is_finite(gradient):
            return
        before = gradient.float() if gradient.element_size() < _WIDTH else None
        gradient.add_(residual, alpha=1.0 / factor)  # the gradient is multiplied by the factor later
        if before is None:
            residual.zero_()
        elif is_finite(gradient):  # subtract only what the gradient's precision could take
            residual.sub_(gradient.float().sub_(before), alpha=factor)
        else:
            gradient.copy_(before)

    def _within(self, first: int, end: int) -> list[Piece]:
        found = (piece.within(first, end) for piece in self._pieces)
        return [piece for piece in found if piece is not None]

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send a part's shards to their owners, and sum this rank's shard; an ``EncodedStart``."""
        rank, seed = group.rank(), _seed(sub_task)
        with self._observer.working("encode", sub_task) as squares, self._on_device():
            self._keep_before(sub_task)
            shards = self._shards(group, sub_task)
            scale(self._buffer[sub_task.offset : sub_task.offset + sub_task.size], self._factor(group.size()))
            sent = {
                other: self._to_host(self._packed(shard, self._values(shard), seed, rank, squares))
                for other, shard in shards.items()
                if other != rank
            }
        own = shards.get(rank, [])

        def add_up(received: dict[int, Tensor]) -> None:
            if own:
                with self._observer.working("reduce", sub_task) as squares, self._on_device():
                    sums = self._values(own)
                    for payload in received.values():
                        self._add(own, self._to_device(payload), sums)
                    packed = self._packed(own, sums, seed, rank, squares, place=True)
                    self._sums[sub_task.index] = self._to_host(packed)

        senders = dict.fromkeys(others_of(group), own) if own else {}
        return self._messages(group, sub_task, senders, sent, number, add_up)

    def gather(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send this rank's summed shard of a part to all ranks and receive theirs; an ``EncodedStart``."""
        shards = self._shards(group, sub_task)
        payload = self._sums.pop(sub_task.index, None)
        sent = {} if payload is None else dict.fromkeys(others_of(group), payload)

        def place(received: dict[int, Tensor]) -> None:
            with self._observer.working("decode", sub_task), self._on_device():
                for rank, payload in received.items():
                    self._place(shards[rank], self._to_device(payload))

        senders = {rank: shards[rank] for rank in others_of(group) if rank in shards}
        return self._messages(group, sub_task, senders, sent, number, place)

    def serve(self, servers: PushPull, server: int, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Push a part to a server, and pull the sum; a ``ServedStart``."""
        self._keep_before(sub_task)
        seed, first, end = _seed(sub_task), sub_task.offset, sub_task.offset + sub_task.size
        pieces, worker = self._within(first, end), servers.group.rank()
        scale(self._buffer[first:end], self._factor(self._observer.ranks))
        values, push = self._values(pieces), self._described(pieces, sub_task, seed)
        passage = sub_task.passage = Passage(server, pushed=0, pulled=0)

        def combine(messages: list[Tensor]) -> Tensor:
            """Sum this and other workers' pushes on this server; the encoded sum replaces the gradient."""
            with self._observer.working("reduce", sub_task) as squares:
                for message in messages:
                    theirs, payload = read(message)
                    if isinstance(theirs, PushedPieces):
                        push.require_alike(theirs)
                    self._add(pieces, payload, values)
                packed = self._packed(pieces, values, seed, worker, squares, place=True)
            sub_task.encoded_bytes = len(packed) * len(messages)
            return packed

        if (own := servers.adds_up(server)) is not None:
            return StartedOperation([own.push_own(number, combine)], messages=True, lane=server)
        with self._observer.working("encode", sub_task) as squares:
            message = described(push, self._packed(pieces, values, seed, worker, squares))
        sub_task.encoded_bytes = passage.pushed = len(message)
        reply = torch.empty(payload_bytes(pieces, self._buffer.element_size()), dtype=torch.uint8)

        def take_back() -> None:
            passage.came, passage.pulled = time.perf_counter(), len(reply)
            with self._observer.working("decode", sub_task):
                self._place(pieces, reply)

        pull = servers.exchange(server, number, message, reply, passage.sent)
        return StartedOperation([pull], take_back, messages=True, lane=server)

    def _described(self, pieces: list[Piece], sub_task: SubCommTask, seed: int) -> PushedPieces:
        return PushedPieces(
            step=sub_task.parent.key.step,
            seed=seed,
            kind=DTYPES.index(self._buffer.dtype),
            loss_scale=self._observer.loss_scale,
            pieces=[self._pushed(piece) for piece in pieces],
        )

    def _pushed(self, piece: Piece) -> PushedPiece:
        whole = next(one for one in self._pieces if one.first <= piece.first < one.end)
        return PushedPiece(
            name=piece.name,
            of=whole.end - whole.first,
            at=piece.first - whole.first,
            size=piece.end - piece.first,
            first=piece.first,
            codec=None if piece.codec is None else piece.codec.spec,
            idle=piece.idle,
        )

    def _keep_before(self, sub_task: SubCommTask) -> None:
        """Give each piece of a part its residual, and save it in case the step is skipped."""
        edges = sub_task.offset, sub_task.offset + sub_task.size
        for at, piece in enumerate(self._pieces):
            if piece.within(*edges) is not None:
                self._pieces[at] = piece = self._observer.with_residual(piece)
                inside = piece.within(*edges)
                if inside is not None and inside.before is not None and inside.residual is not None:
                    inside.before.copy_(inside.residual)

    # ------------------------------------------------------------------ messages

    def _messages(
        self,
        group: dist.ProcessGroup,
        sub_task: SubCommTask,
        senders: dict[int, list[Piece]],
        sent: dict[int, Tensor],
        number: int,
        then: Callable[[dict[int, Tensor]], None],
    ) -> StartedOperation:
        """Exchange payloads, then call ``then`` with those of ``senders``."""
        sub_task.encoded_bytes = (sub_task.encoded_bytes or 0) + sum(len(payload) for payload in sent.values())
        width = self._buffer.element_size()
        received = {rank: self._memory(payload_bytes(shard, width)) for rank, shard in senders.items()}
        return StartedOperation(_works(group, received, sent, number), partial(then, received), messages=True)

    def _shards(self, group: dist.ProcessGroup, sub_task: SubCommTask) -> dict[int, list[Piece]]:
        shards = {}
        for rank in range(group.size()):
            first, end = (sub_task.offset + edge for edge in shard_of(sub_task.size, rank, group.size()))
            if first < end:
                shards[rank] = self._within(first, end)
        return shards

    # ------------------------------------------------------------------ devices

    def _on_device(self) -> AbstractContextManager[None]:
        """Wrap arithmetic on the device; it is complete on exit."""
        return nullcontext() if self._copies is None else self._copies.working()

    def _to_host(self, payload: Tensor) -> Tensor:
        return payload if self._copies is None else self._copies.to_host(payload)

    def _to_device(self, payload: Tensor) -> Tensor:
        return payload if self._copies is None else self._copies.to_device(payload)

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8) if self._copies is None else self._copies.memory(size)

    # ------------------------------------------------------------------ arithmetic

    def _values(self, shard: list[Piece]) -> list[Tensor]:
        """Return this rank's values of a shard: views of the buffer, or fp32 copies for a codec."""
        parts = [(piece, self._buffer[piece.first : piece.end]) for piece in shard]
        return [part if piece.codec is None else part.float() for piece, part in parts]

    def _packed(
        self,
        shard: list[Piece],
        values: list[Tensor],
        seed: int,
        worker: int,
        squares: list[float],
        *,
        place: bool = False,
    ) -> Tensor:
        """Encode a shard and keep its residual; with ``place``, write the decoded values into the buffer."""
        bodies = []
        for piece, part in zip(shard, values, strict=True):
            bodies.append(encoded(piece, part, seed=seed, worker=worker, squares=squares))
            if place:  # decode the bytes that travel, as all other ranks do
                self._place_piece(piece, bodies[-1])
        return joined(shard, bodies, self._buffer.element_size())

    def _add(self, shard: list[Piece], payload: Tensor, sums: list[Tensor]) -> None:
        for (piece, body), total in zip(bodies_of(shard, payload, self._buffer.element_size()), sums, strict=True):
            if piece.codec is None:
                total.add_(body.view(total.dtype))
            else:
                piece.codec.add(body, total)

    def _place(self, shard: list[Piece], payload: Tensor) -> None:
        for piece, body in bodies_of(shard, payload, self._buffer.element_size()):
            self._place_piece(piece, body)

    def _place_piece(self, piece: Piece, body: Tensor) -> None:
        gradient = self._buffer[piece.first : piece.end]
        if piece.codec is None:
            gradient.copy_(body.view(gradient.dtype))
        elif gradient.dtype is torch.float32:
            piece.codec.decompress(body, len(gradient), out=gradient)
        else:
            gradient.copy_(piece.codec.decompress(body, len(gradient)))


def _seed(sub_task: SubCommTask) -> int:
    """Return a random seed: equal on all ranks and in both directions, different for each part and step."""
    key = sub_task.parent.key
    names = f"{key.step} {key.bucket} {sub_task.index}".encode()
    return int.from_bytes(hashlib.blake2b(names, digest_size=7).digest(), "little")


def _works(
    group: dist.ProcessGroup, received: Mapping[int, Tensor], sent: Mapping[int, Tensor], number: int
) -> list[dist.Work]:
    works = [group.recv([payload], rank, number) for rank, payload in received.items()]
    return works + [group.send([sent[rank]], rank, number) for rank in others_of(group) if rank in sent]
