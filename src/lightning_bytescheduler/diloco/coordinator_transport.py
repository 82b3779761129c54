"""A way to the others through the coordinator: uploads, means, states, and where this worker stands among the rounds.

Its network is the client's thread's; encoding and decoding are done on a thread of their own,
``bytescheduler-coordinator-codec``, so that they hold up neither messages nor the training.

One lock, of :attr:`CoordinatorTransport.changed`, which the session that is told of everything uses too. It is held
only for looking and noting; nothing is called with it held that takes another lock, but what posts to the client, which
takes none that is ever held while waiting for this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import (
    CHAIN_HEADER,
    DIGEST_HEADER,
    ROUND_SAMPLES_HEADER,
    SAMPLES_HEADER,
    STATE_PATH,
    STEPS_HEADER,
    TOKENS_HEADER,
    TOTAL_HEADER,
    VERSION_HEADER,
    FromWorker,
    UpdateReceipt,
    Welcome,
    chain_after,
    update_path,
)
from lightning_bytescheduler.diloco.outer_optimizer import Contribution
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.exceptions import CoordinatorError, SchedulerTimeoutError

log = logging.getLogger(__name__)

START = "0" * 32
"""The chain before the first round."""

_T = TypeVar("_T")
_SLICE_S = 1.0
_ASK_AGAIN_S = 0.2
_ASK_AGAIN_MOST_S = 5.0
_NOT_NOW = 409
_WRONG_WEIGHTS = (413, 422)
_CODEC = "bytescheduler-coordinator-codec"


class AwayError(Exception):
    """There is no coordinator now, or none that knows what is asked for: the worker goes on alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Of a round that has ended.

    Attributes:
        values: Flat, fp32; empty if nothing was merged.
        total: The sum of the weights.
        chain: Of the weights that it is a part of.
    """

    values: Tensor
    total: int
    chain: str


class CoordinatorTransport:
    """See the module. All but what :class:`Welcome` and messages bring is called by the training thread.

    Args:
        client: The connection.
        wire: What travels.
        sizes: Elements of each fragment.
        timeline: Where spans go.

    Attributes:
        timeline: The same.
        changed: Notified of everything that the network brings; holds the lock for all that follows.
        connected: Whether there is a connection.
        welcome: The last one.
        provides: Whether it asks for this worker's weights as the first ones: once in a connection, until it has some.
        realign: Whether it asks for the state before this worker can go on.
        version: Of the global weights here.
        chain: Of the same.
        ended: The last round that is known to have ended.
        wire: As given.
        residuals: What was left out of updates that count, by fragment; replaced, never changed.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        wire: WireFormat,
        sizes: list[int],
        timeline: OuterTimeline | None = None,
    ) -> None:
        with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
            from xxhash import xxh3_128_hexdigest

            self._digest: Callable[[Any], str] = xxh3_128_hexdigest
        self.client = client
        self.timeline = OuterTimeline() if timeline is None else timeline
        self.changed = threading.Condition()
        self.connected = False
        self.welcome: Welcome | None = None
        self.provides = False
        self.realign = True
        self.version = 0
        self.chain = START
        self.ended = 0
        self.wire = wire
        self._sizes = sizes
        self.residuals: dict[int, Tensor | None] = {}
        self._codec = ThreadPoolExecutor(1, thread_name_prefix=_CODEC)
        self._coding: Future[Any] | None = None  # the last that it was given
        self._means: dict[int, Future[Mean | None]] = {}
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------ the client's thread

    def welcomed(self, welcome: Welcome, *, begun: bool) -> None:
        """There is a connection. Called with the lock held.

        Args:
            welcome: What the coordinator says.
            begun: Whether this worker has had the run's weights before.
        """
        self.connected = True
        self.welcome = welcome
        self.provides = welcome.provide
        self.realign = welcome.fetch or welcome.provide or not begun
        self.ended = welcome.version
        self._means.clear()

    @property
    def rewound(self) -> bool:
        """Whether the coordinator has gone back behind this worker: to a state from before its last round."""
        return self.realign and self.version > self.ended

    def round_ended(self, round: int) -> None:
        """A round has ended: fetch its mean, if it is the next one here. Called with the lock held."""
        self.ended = max(self.ended, round)
        if round == self.version + 1 and not self.realign:
            self._mean(round)

    # ------------------------------------------------------------------ the training thread: updates

    def post(self, *messages: FromWorker) -> None:
        """Send messages to the coordinator; at once, never blocks."""
        self.client.post(*messages)

    def start(self, contribution: Contribution) -> CoordinatedExchange:
        """Begin to encode and upload an update, until there is an answer."""
        exchange = CoordinatedExchange(self, contribution)
        exchange.uploading = self._start(self._upload(contribution, exchange))
        return exchange

    def abort(self, cause: BaseException) -> None:
        """Fail whatever is waited for, now and later. For any thread."""
        with self.changed:
            if self._failure is None:
                self._failure = cause
            self.changed.notify_all()

    def stop(self, timeout: float) -> bool:
        """End the connection and the threads; returns whether they ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        ended = self.client.stop(timeout)
        self._codec.shutdown(wait=False, cancel_futures=True)
        # What is being encoded can't be interrupted, and takes seconds for a large model: it is left to end by itself.
        with self.changed:
            coding = self._coding
        if coding is None or not wait([coding], max(deadline - time.monotonic(), 0.0)).not_done:
            self._codec.shutdown(wait=True)  # of an idle thread
            return ended
        return False

    # ------------------------------------------------------------------ the training thread: where the others are

    def check(self) -> None:
        """Raise what the connection has ended with, if anything."""
        if self._failure is not None:
            raise self._failure

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        timeout: float,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until something is so.

        Args:
            ready: Called with the lock held.
            what: The same in words, for the error.
            timeout: Longest wait, in seconds.
            meanwhile: Called about once a second of waiting, with the lock held.

        Raises:
            AwayError: If the connection is lost.
            SchedulerTimeoutError: If it is not in time.
        """
        asked = time.monotonic()

        def goes_on() -> bool:
            nonlocal asked
            self.check()
            if time.monotonic() - asked >= _SLICE_S:
                asked = time.monotonic()
                meanwhile()
            return self.connected

        if not self.timeline.wait_until(self.changed, ready, what, timeout=timeout, goes_on=goes_on):
            raise AwayError

    def has_mean(self, round: int) -> bool:
        """Whether a round has ended and its mean is here, or cannot be had. Called with the lock held."""
        return self.ended >= round and (round != self.version + 1 or self._mean(round).done())

    def mean(self, round: int, timeout: float) -> Mean | None:
        """The mean of the round after this worker's version, once it has ended; ``None`` to take the state instead.

        Raises:
            AwayError: If the connection is lost.
        """
        with self.changed:
            future = self._mean(round)
        self.wait(lambda: future.done() or self.realign, f"the mean of round {round}", timeout)
        mean = future.result() if future.done() and not future.cancelled() else None
        if mean is None:
            with self.changed:
                if not self.connected:
                    raise AwayError
                self.realign = True
            log.info("%s takes the global state: no mean of round %d follows its weights", self.client.worker, round)
        return mean

    def took(self, round: int, mean: Mean) -> None:
        """The outer step with this mean was taken."""
        with self.changed:
            self.version, self.chain = round, mean.chain
            self._means = {number: one for number, one in self._means.items() if number > round}

    def fetch_state(self, timeout: float) -> tuple[bytes, int, str]:
        """The global state as it is now, as ``outer_optimizer`` reads it; its version and its chain.

        Raises:
            AwayError: If the connection is lost.
        """
        return self._answer(self._state(), "the global weights", timeout)

    def provide(self, payload: bytes, timeout: float) -> None:
        """Send this worker's weights as the first ones.

        Raises:
            AwayError: If the connection is lost, or there are still none.
            CoordinatorError: If they are refused for what is in them.
        """
        there = self._answer(self._provide(payload), "the answer to the first weights", timeout)
        with self.changed:
            self.provides = not there
        if not there:
            raise AwayError

    def aligned(self, version: int, chain: str) -> None:
        """This worker has the weights of that version."""
        with self.changed:
            self.version, self.chain, self.realign = version, chain, False
            self.ended = max(self.ended, version)
            self._means.clear()

    # ------------------------------------------------------------------ coroutines

    def _start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        future = self.client.start(work)
        future.add_done_callback(self._notify)
        return future

    def _answer(self, work: Coroutine[Any, Any, _T], what: str, timeout: float) -> _T:
        future = self._start(work)
        try:
            self.wait(future.done, what, timeout)
        finally:
            future.cancel()  # what is done stays so
        return future.result()

    def _notify(self, _: object) -> None:
        with self.changed:
            self.changed.notify_all()

    def _mean(self, round: int) -> Future[Mean | None]:
        if round not in self._means:
            self._means[round] = self._start(self._fetch_mean(round, self.chain))
        return self._means[round]

    async def _fetch_mean(self, round: int, chain: str) -> Mean | None:
        fragment = (round - 1) % len(self._sizes)
        began = self.timeline.now()
        answer = await self.client.request("GET", update_path(round, fragment))
        self._travelled("pull", began, fragment, len(answer.body))
        if answer.status != 200:
            log.info("coordinator: no mean of round %d: %s", round, answer.words)
            return None
        total = int(answer.headers.get(TOTAL_HEADER, "0"))
        digest = answer.headers.get(DIGEST_HEADER, "") if total else ""
        then = answer.headers.get(CHAIN_HEADER, "")
        values = torch.empty(0, dtype=torch.float32)
        if total:
            values = await self._coded(self._decode, answer.body, fragment, digest)
        if chain_after(chain, round=round, fragment=fragment, digest=digest, total=total) != then:
            return None
        return Mean(values=values, total=total, chain=then)

    def _travelled(self, name: str, began: float, fragment: int, nbytes: int) -> None:
        now = self.timeline.now()
        self.timeline.travelled(name, began, now, fragment=f"fragment {fragment}", part=0, nbytes=nbytes)

    def _decode(self, body: bytes, fragment: int, digest: str) -> Tensor:
        began = self.timeline.now()
        if self._digest(body) != digest:
            raise CoordinatorError(f"The mean of fragment {fragment} was damaged on its way.")
        payload = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        mean = self.wire.of_means.decode(payload, self._sizes[fragment])
        self.timeline.coded("decode", began, lane="codec")
        return mean

    async def _upload(self, contribution: Contribution, exchange: CoordinatedExchange) -> UpdateReceipt | None:
        body, digest = await self._coded(self._encode, contribution, exchange)
        path = update_path(contribution.round, contribution.fragment)
        headers = {
            DIGEST_HEADER: digest,
            SAMPLES_HEADER: str(contribution.samples),
            TOKENS_HEADER: str(contribution.tokens),
            STEPS_HEADER: str(contribution.steps),
            ROUND_SAMPLES_HEADER: str(contribution.round_samples),
        }
        pause = _ASK_AGAIN_S
        began = self.timeline.now()
        answer = await self.client.request("PUT", path, headers=headers, body=body)
        self._travelled("push", began, contribution.fragment, len(body))
        # A coordinator that was started again may not have begun this round yet, or not know this worker's part in it.
        while answer.status == _NOT_NOW and self.ended < contribution.round:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _ASK_AGAIN_MOST_S)
            answer = await self.client.request("PUT", path, headers=headers, body=body)
        if answer.status != 200:
            log.warning(
                "coordinator: the pseudo-gradient of round %d was not taken: %s", contribution.round, answer.words
            )
            return None
        receipt = msgspec.json.decode(answer.body, type=UpdateReceipt)
        if receipt.verdict != "added":
            log.info("coordinator: the pseudo-gradient of round %d: %s", contribution.round, receipt.verdict)
        return receipt

    def _encode(self, contribution: Contribution, exchange: CoordinatedExchange) -> tuple[bytes, str]:
        began = self.timeline.now()
        place = f"{contribution.worker} {contribution.round} {contribution.fragment}"
        seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big")
        residual = None
        if self.wire.keeps_residuals and contribution.samples:
            known = self.residuals.get(contribution.fragment)
            residual = torch.zeros_like(contribution.pseudo_gradient) if known is None else known.clone()
        body = self.wire.encode(contribution.pseudo_gradient, seed=seed, residual=residual).numpy().tobytes()
        exchange.residual = residual
        digest = self._digest(body)
        self.timeline.coded("encode", began, lane="codec")
        return body, digest

    async def _state(self) -> tuple[bytes, int, str]:
        while True:
            answer = await self.client.request("GET", STATE_PATH)
            if answer.status == 200:
                version = int(answer.headers.get(VERSION_HEADER, "0"))
                return answer.body, version, answer.headers.get(CHAIN_HEADER, START)
            log.debug("coordinator: no state yet: %s", answer.words)
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _provide(self, payload: bytes) -> bool:
        headers = {DIGEST_HEADER: await self._coded(self._digest, payload)}
        answer = await self.client.request("PUT", STATE_PATH, headers=headers, body=payload)
        if answer.status in _WRONG_WEIGHTS:
            raise CoordinatorError(f"The coordinator refuses this worker's weights: {answer.words}")
        if answer.status >= 300:
            log.info("coordinator: the first weights were not taken: %s", answer.words)
        return answer.status < 300 or answer.status == _NOT_NOW  # another worker has sent some

    async def _coded(self, function: Callable[..., _T], *arguments: object) -> _T:
        coding = self._codec.submit(function, *arguments)
        with self.changed:
            self._coding = coding
        return await asyncio.wrap_future(coding)


class CoordinatedExchange:
    """An update that is on its way, and the mean of its round.

    Args:
        transport: Carries it.
        contribution: The update.

    Attributes:
        round: In which it was made.
        uploading: Ends with what becomes of it.
        residual: What was left out of it; set by the thread that encodes it, before it is sent.
    """

    uploading: Future[UpdateReceipt | None]
    residual: Tensor | None = None

    def __init__(self, transport: CoordinatorTransport, contribution: Contribution) -> None:
        self.round = contribution.round
        self._fragment = contribution.fragment
        self._transport = transport

    def is_there(self) -> bool:
        """Whether the mean is there, and it is known what became of the update; or there is nothing to wait for."""
        transport = self._transport
        with transport.changed:
            return transport.realign or self._failed or (self.uploading.done() and transport.has_mean(self.round))

    def wait(self, timeout: float) -> Mean | None:
        """Wait for the mean of its round; ``None`` if other rounds, or the state, come first.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            AwayError: If the connection is lost.
        """
        transport = self._transport
        transport.wait(
            lambda: transport.ended >= self.round or transport.realign or self._failed,
            f"the end of round {self.round}",
            timeout,
        )
        if self._failed:
            self.uploading.result()  # raises
        if transport.realign or transport.version != self.round - 1:
            return None
        return transport.mean(self.round, timeout)

    def await_receipt(self, timeout: float) -> UpdateReceipt | None:
        """Wait for what becomes of the update, as long as there is a connection."""
        with suppress(AwayError, SchedulerTimeoutError):
            self._transport.wait(self.uploading.done, "the receipt of an update", timeout)
        known = self.uploading.done() and not self.uploading.cancelled() and not self._failed
        return self.uploading.result() if known else None

    def settle(self, *, total: int, timeout: float) -> bool:
        """Its round is over: keep what was left out of it to be sent later, if it counts.

        Args:
            total: The sum of the weights in the mean of its round. Without any there was no quorum, and of what was
                sent nothing counts but what was late and is part of a later round.
            timeout: Longest wait for the receipt, in seconds.

        Returns:
            Whether the update is part of a sum, as far as that is known; asked only where something depends on it.
        """
        transport = self._transport
        if total and not transport.wire.keeps_residuals:
            return True
        receipt = self.await_receipt(timeout)
        if receipt is None:
            self.uploading.cancel()
            return False
        counts = bool(receipt.weight) and (receipt.verdict == "late" or bool(total))
        if counts:
            # What the coordinator had before may be another version of it, of which nothing is known any more.
            transport.residuals[self._fragment] = None if receipt.verdict == "again" else self.residual
        return counts

    @property
    def _failed(self) -> bool:
        done = self.uploading.done() and not self.uploading.cancelled()
        return done and self.uploading.exception() is not None
