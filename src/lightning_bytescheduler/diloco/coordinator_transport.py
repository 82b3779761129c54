"""The exchange through the coordinator: uploads, means and states, each as a future.

The network belongs to the client's thread. Encoding and decoding have a thread of their own,
``bytescheduler-coordinator-codec``, so that they delay neither messages nor the training.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
    TOTAL_HEADER,
    TRAINED_HEADER,
    VERSION_HEADER,
    UpdateReceipt,
    chain_after,
    update_path,
)
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, Mean, Upload
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.exceptions import CoordinatorError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ASK_AGAIN_S = 0.2
_ASK_AGAIN_MOST_S = 5.0
_NOT_NOW = 409
_WRONG_WEIGHTS = (413, 422)
_CODEC = "bytescheduler-coordinator-codec"


class CoordinatorTransport:
    """See the module. For the training thread.

    Args:
        client: The connection.
        wire: The format of updates and means.
        sizes: Elements of each fragment.
        timeline: Records spans, if given.

    Attributes:
        client: As given.
        wire: As given.
        timeline: As given.
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
        self.wire = wire
        self._sizes = sizes
        self.residuals: dict[int, Tensor | None] = {}
        self._codec = ThreadPoolExecutor(1, thread_name_prefix=_CODEC)

    @property
    def keeps_residuals(self) -> bool:
        """See ``Exchange``."""
        return self.wire.keeps_residuals

    @property
    def source(self) -> CoordinatorTransport:
        """See ``Exchange``."""
        return self

    def start(self, contribution: Contribution, wanted: Callable[[], bool] = lambda: True) -> Upload:
        """Begin to encode and upload an update, until there is an answer.

        Args:
            contribution: The update.
            wanted: Whether to ask again if its round has not begun at the coordinator.
        """
        upload = Upload(fragment=contribution.fragment)
        upload.receipt = self.client.start(self._upload(contribution, upload, wanted))
        return upload

    def settle(self, upload: Upload, *, total: int) -> None:
        """See ``Exchange``. If the update counts, keep what was left out of it to send later."""
        if total and not self.keeps_residuals:
            return
        receipt = upload.answer
        if receipt is None:
            upload.receipt.cancel()
        elif receipt.weight and total:
            # The coordinator may have had another version of this update before, of which nothing is known here.
            self.residuals[upload.fragment] = None if receipt.verdict == "again" else upload.residual

    def fetch_mean(self, round: int, chain: str) -> Future[Mean | None]:
        """The mean of a round that has ended, if it follows weights of that chain."""
        return self.client.start(self._fetch_mean(round, chain))

    def flush(self, timeout: float) -> bool:
        """Wait until all messages are heard; returns whether they were, in time."""
        return self.client.flush(timeout)

    def fetch_state(self) -> Future[tuple[bytes, int, str]]:
        """The global state as it is now, as ``outer_optimizer`` reads it; its version and its chain."""
        return self.client.start(self._state())

    def provide(self, payload: bytes) -> Future[bool]:
        """Send this worker's weights as the first ones; return whether the coordinator has weights then.

        It fails with a ``CoordinatorError`` if the weights are refused for their content.
        """
        return self.client.start(self._provide(payload))

    def stop(self, timeout: float) -> bool:
        """End the connection and the threads; returns whether they ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        coded = self._codec.submit(bool)  # after what is encoded now
        ended = self.client.stop(timeout)
        # A running encoding cannot be interrupted, and takes seconds for a large model: it is left to end by itself.
        idle = not wait([coded], max(deadline - time.monotonic(), 0.0)).not_done
        self._codec.shutdown(wait=idle, cancel_futures=True)
        return ended and idle

    # ------------------------------------------------------------------ coroutines

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

    async def _upload(
        self, contribution: Contribution, upload: Upload, wanted: Callable[[], bool]
    ) -> UpdateReceipt | None:
        body, digest = await self._coded(self._encode, contribution, upload)
        path = update_path(contribution.round, contribution.fragment)
        headers = {
            DIGEST_HEADER: digest,
            SAMPLES_HEADER: str(contribution.samples),
            STEPS_HEADER: str(contribution.steps),
            ROUND_SAMPLES_HEADER: str(contribution.round_samples),
        }
        if contribution.trained:
            trained = msgspec.json.encode(contribution.trained)
            headers[TRAINED_HEADER] = str(len(trained))
            body = trained + body
        pause = _ASK_AGAIN_S
        began = self.timeline.now()
        answer = await self.client.request("PUT", path, headers=headers, body=body)
        self._travelled("push", began, contribution.fragment, len(body))
        # A restarted coordinator may not have begun this round yet, or not know this worker's part in it.
        while answer.status == _NOT_NOW and wanted():
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

    def _encode(self, contribution: Contribution, upload: Upload) -> tuple[bytes, str]:
        began = self.timeline.now()
        place = f"{contribution.worker} {contribution.round} {contribution.fragment}"
        seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big")
        residual = None
        if self.wire.keeps_residuals and contribution.samples:
            known = self.residuals.get(contribution.fragment)
            residual = torch.zeros_like(contribution.pseudo_gradient) if known is None else known.clone()
        body = self.wire.encode(contribution.pseudo_gradient, seed=seed, residual=residual).numpy().tobytes()
        upload.residual = residual
        digest = self._digest(body)
        self.timeline.coded("encode", began, lane="codec")
        return body, digest

    async def _state(self) -> tuple[bytes, int, str]:
        while True:
            answer = await self.client.request("GET", STATE_PATH)
            if answer.status == 200:
                version = int(answer.headers.get(VERSION_HEADER, "0"))
                return answer.body, version, answer.headers.get(CHAIN_HEADER, "0" * 32)
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
        return await asyncio.wrap_future(self._codec.submit(function, *arguments))
