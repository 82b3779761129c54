"""Compressed gradients with parameter servers: what is pushed, and how a server adds that up.

Of each part of a bucket, which goes to one server::

    push    each rank encodes what it has of the part, and what it had left to send of it
    sum     the server decodes what comes, adds up in fp32, adds what it had left to send itself, and encodes the sum,
            once
    pull    everybody takes the decoded bytes that travelled: the same bits on all ranks

That is the reduction in shards (``compressed_reduction.py``) with a part for a shard. Where a rank is the server of a
part, its own share of the sum is not encoded, and what is left of the sum is in its own residual, as there. A server on
a machine of its own has a residual for what it encodes: it is kept by the names of parameters, so that parts may be cut
anew, and parts stay at one server for as long as they are cut alike (``push_pull.py``). Where they move all the
same, what a server has left of them waits until they come back, or is in the next checkpoint.

Source: compression at both sides of a server is that of BytePS and of Zhong et al., "Compressed Communication for
Distributed Training"; error feedback in both directions that of Tang et al., "DoubleSqueeze", ICML 2019.
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
    """``lightning-bytescheduler server``, for gradients compressed or not."""
    return server_command.run(options, sums=EncodedSums)


class _Sum:
    """What has been added up of a part."""

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
            if len(self.values) <= at:  # a copy: what is added to must be nobody else's
                self.values.append(
                    body.view(dtype).clone() if piece.codec is None else piece.codec.decompress(body, size)
                )
            elif piece.codec is None:
                self.values[at].add_(body.view(dtype))
            else:
                piece.codec.add(body, self.values[at])


class EncodedSums:
    """Adds up what is pushed to one server during one fit, and keeps what is left of the sums.

    For several threads: sums of different parts are formed beside each other.

    Args:
        worker: The server's number among all that encode; tells random numbers apart.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._residuals = Residuals()
        self._step = 0
        self._kept: set[str] = set()  # of which in this step it is known what there was before
        self._lock = threading.Lock()  # of the three above

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
        """Steps follow each other: a sum of the next one is there when all ranks have pulled all of the last."""
        if push.step == self._step:
            return
        if push.step != self._step + 1:
            self._residuals.keep_step()  # nothing of the last step came here: what was before is not of that
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
