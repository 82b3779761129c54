"""Compressed gradients with parameter servers: what ranks push, and how a server sums it.

Each part of a bucket goes to one server::

    push    each rank encodes its values of the part, with its residual
    sum     the server decodes them, sums in fp32, adds its own residual, and encodes the sum once
    pull    every rank takes the decoded bytes: the same bits on all ranks

This is the reduction in shards (``compressed_reduction.py``) with a part for a shard. If a rank is the server, its own
share is not encoded, and the residual of the sum joins its own. A server on a separate machine keeps its residuals by
the names of parameters, so that parts may be cut anew. Parts stay at one server while they are cut alike
(``push_pull.py``). If they move, the server's residual waits until they return or a checkpoint takes it.

Source: compression on both sides of a server: BytePS, and Zhong et al., "Compressed Communication for Distributed
Training". Error feedback in both directions: Tang et al., "DoubleSqueeze", ICML 2019.
"""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_bytescheduler.collectives import server_command
from lightning_bytescheduler.collectives.summing_server import DTYPES
from lightning_bytescheduler.ddp.encoded_pieces import (
    LeftQuestion,
    Piece,
    PushedPiece,
    PushedPieces,
    answered,
    bodies_of,
    encoded,
    joined,
    read,
)
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["EncodedSums", "add_arguments", "run"]

add_arguments = server_command.add_arguments


def run(options: argparse.Namespace) -> int:
    """Run ``lightning-bytescheduler server``, for gradients compressed or not."""
    return server_command.run(options, sums=EncodedSums)


class _Sum:
    def __init__(self, push: PushedPieces) -> None:
        self.push = push
        self.pieces = [pushed.piece() for pushed in push.pieces]
        self.values: list[Tensor] = []
        self.idle = [True] * len(self.pieces)

    def add(self, push: PushedPieces, payload: Tensor) -> None:
        self.push.require_alike(push)
        self.idle = [known and pushed.idle for known, pushed in zip(self.idle, push.pieces, strict=True)]
        dtype = DTYPES[push.kind]
        for at, (piece, body) in enumerate(bodies_of(self.pieces, payload, dtype.itemsize)):
            size = piece.end - piece.first
            if len(self.values) <= at:  # a clone, as sums are added in place
                self.values.append(
                    body.view(dtype).clone() if piece.codec is None else piece.codec.decompress(body, size)
                )
            elif piece.codec is None:
                self.values[at].add_(body.view(dtype))
            else:
                piece.codec.add(body, self.values[at])


class EncodedSums:
    """Sums the pushes to one server during one fit, and keeps the residuals of the sums.

    Thread-safe: different parts are summed concurrently.

    Args:
        worker: The server's number among all encoders, which gives it its own random numbers.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._residuals = Residuals()
        self._step = 0
        self._kept: set[str] = set()  # parameters whose residual at the beginning of this step is saved
        self._lock = threading.Lock()  # guards the three attributes above

    def added(self, total: Any, message: Tensor) -> Any:
        """See ``summing_server.SumsOfEncoded``."""
        push, payload = read(message)
        if not isinstance(push, PushedPieces):
            raise UnsupportedError("A question was pushed as if it was to be added up.")
        found = total if isinstance(total, _Sum) else _Sum(push)
        found.add(push, payload)
        return found

    def reply(self, total: Any) -> Tensor:
        """See ``summing_server.SumsOfEncoded``."""
        push = total.push
        with self._lock:
            self._begin_step(push)
            pieces = [
                replace(self._with_residual(piece, pushed), idle=idle)
                for piece, pushed, idle in zip(total.pieces, push.pieces, total.idle, strict=True)
            ]
        bodies = [
            encoded(piece, part, seed=push.seed, worker=self._worker, squares=[])
            for piece, part in zip(pieces, total.values, strict=True)
        ]
        return joined(pieces, bodies, DTYPES[push.kind].itemsize)

    def answer(self, message: Tensor) -> Tensor:
        """See ``summing_server.SumsOfEncoded``."""
        question, _ = read(message)
        if not isinstance(question, LeftQuestion):
            raise UnsupportedError("Pieces were pushed as if they were a question.")
        with self._lock:
            known = self._residuals.knows(question.name)
            left = self._residuals.of(question.name, question.size) if known else None
            return answered(left, self._residuals.loss_scale)

    def _begin_step(self, push: PushedPieces) -> None:
        """Begin a step with its first sum, which completes after all ranks have pulled the last step's sums."""
        if push.step == self._step:
            return
        if push.step != self._step + 1:
            self._residuals.keep_step()  # no part of the previous step came here, so saved residuals are not from it
        self._step = push.step
        self._kept.clear()
        self._residuals.begin_step(push.loss_scale)

    def _with_residual(self, piece: Piece, pushed: PushedPiece) -> Piece:
        if piece.codec is None:
            return piece
        residual, before = self._residuals.to_change(pushed.name, pushed.of)
        if before is not None and pushed.name not in self._kept:
            self._kept.add(pushed.name)
            before.copy_(residual)
        return replace(piece, residual=residual[pushed.at : pushed.at + pushed.size])
