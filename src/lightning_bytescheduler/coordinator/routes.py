"""Updates up, means and the state down, and the first weights up.

An update is streamed to the spool and checked (length, digest, every value) before the run hears of it. It is then
added to its sum in threads; a merge waits for additions under way, so that the record of a round says what is in its
sum. A connection that dies half-way leaves nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec
from aiohttp import web
from torch import Tensor

from lightning_bytescheduler.coordinator.connection import Stalls
from lightning_bytescheduler.coordinator.global_weights import GlobalWeights, KeptMean
from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.run import Merge, Offer, Run, Seen
from lightning_bytescheduler.coordinator.spool import Spool, Spooled, view_of
from lightning_bytescheduler.coordinator.update_sum import Inspection, UpdateSum
from lightning_bytescheduler.diloco.coordinator_protocol import (
    CHAIN_HEADER,
    DIGEST_HEADER,
    ROUND_SAMPLES_HEADER,
    SAMPLES_HEADER,
    STEPS_HEADER,
    TOKENS_HEADER,
    TOTAL_HEADER,
    VERSION_HEADER,
    ModelParameter,
    UpdateReceipt,
    encode_frame,
)
from lightning_bytescheduler.diloco.messages import MOST
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError


def problem(status: int, error: str, *, retry_after: float | None = None) -> web.Response:
    """An answer that says what is wrong.

    Args:
        status: Of HTTP.
        error: In words.
        retry_after: Seconds after which it may be tried again.
    """
    headers = {} if retry_after is None else {"Retry-After": str(max(round(retry_after), 1))}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


_ROOM_SECONDS = 5.0
_CHUNK = 1 << 18
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LARGE = 1 << 24  # bytes of a mean whose sending takes as long as a step
_ASKED_S, _LOOK_S, _LONGEST_S = 0.05, 0.01, 1.0


class UpdateRoutes:
    """Takes updates and hands out means, for one run. On the event loop.

    Args:
        run: The core of the run.
        spool: Where updates are kept until they are added.
        stalls: Cuts off transfers that do not get on.
    """

    def __init__(self, run: Run, spool: Spool, stalls: Stalls) -> None:
        self._run = run
        self._spool = spool
        self._stalls = stalls
        self.weights: GlobalWeights | None = None
        self._sums: dict[int, UpdateSum] = {}
        self._uploads: dict[tuple[str, int], asyncio.Task[object]] = {}  # by worker and round
        self._downloads = 0

    # ── Updates ───────────────────────────────────────────────────────────

    async def put(self, request: web.Request, member: Member) -> web.StreamResponse:
        """Take an update."""
        weights = self.weights
        if weights is None:
            return problem(409, "There are no weights yet, so there is no round.", retry_after=1)
        try:
            offer = _offer_of(request, member)
            digest = request.headers.get(DIGEST_HEADER, "")
            if not _DIGEST.fullmatch(digest):
                raise OptionError(DIGEST_HEADER, digest[:40], "xxh3_128 of the body, 32 hexadecimal digits")
            seen = self._run.seen(offer)
            place = None if seen is not None else self._run.place_of(offer)
            expected = weights.formats[offer.fragment].payload_bytes
            if request.content_length != expected:
                given = request.content_length
                raise OptionError("Content-Length", given, f"{expected}, the size of fragment {offer.fragment}")
            self._run.weight_of(offer)
        except OptionError as error:
            self._run.count("updates_refused")
            return problem(409 if error.option in ("round", "fragment") else 400, str(error))
        if seen is not None:
            return self._again(seen)
        if place is None:
            self._run.dropped(offer, time.monotonic())
            return self._receipt("dropped", 0)
        if place == offer.round:
            self._run.sending(offer, time.monotonic())
        return await self._alone(request, weights, offer, digest, expected)

    def cut(self, member: Member) -> None:
        """End the uploads of a worker that has gone."""
        self._cut(lambda name, _: name == member.name)

    def _cut(self, concerns: Callable[[str, int], bool]) -> None:
        for (name, round), task in list(self._uploads.items()):
            if concerns(name, round):
                task.cancel()

    async def _alone(
        self, request: web.Request, weights: GlobalWeights, offer: Offer, digest: str, expected: int
    ) -> web.StreamResponse:
        """Take the newest upload of a worker's update: one before it that is not complete is of a dead connection."""
        key = (offer.member.name, offer.round)
        former = self._uploads.get(key)
        if former is not None:
            former.cancel()
        task = asyncio.current_task()
        if task is not None:
            self._uploads[key] = task
        try:
            try:
                spooled, inspection = await self._received(request, weights, offer, expected)
            finally:
                if self._uploads.get(key) is task:
                    del self._uploads[key]
            # A worker that goes away now has sent its update all the same.
            return await asyncio.shield(self._take(offer, spooled, inspection, digest))
        except SchedulerTimeoutError as error:
            return problem(503, str(error), retry_after=1)
        except OptionError as error:
            self._run.count("updates_refused")
            return problem(422, str(error))
        except (ConnectionError, asyncio.IncompleteReadError, web.HTTPException) as error:
            self._run.count("updates_broken")
            return problem(400, f"The update did not come in whole: {type(error).__name__}.")

    async def _received(
        self, request: web.Request, weights: GlobalWeights, offer: Offer, expected: int
    ) -> tuple[Spooled, Inspection]:
        """An upload that came in whole, and its inspection; room for it is given back where it did not."""
        spooled = await self._spool.room_for(expected, timeout=_ROOM_SECONDS)
        try:
            inspection = weights.inspection_of(offer.fragment, spooled.payload)
            await self._receive(request, offer.member, spooled, inspection)
        except BaseException:
            spooled.close()
            raise
        return spooled, inspection

    async def _receive(self, request: web.Request, member: Member, spooled: Spooled, inspection: Inspection) -> None:
        content = request.content
        task = asyncio.current_task()
        with self._stalls.watch(task.cancel if task is not None else bool) as transfer:
            while not spooled.is_complete:
                chunk = await content.readany()
                if not chunk and content.at_eof():
                    raise ConnectionError("The body ended early.")
                transfer.moved = True
                spooled.write(chunk)
                inspection.advance(spooled.filled)
        self._run.count("bytes_in", spooled.filled)
        self._run.tally(member.name).bytes_in += spooled.filled

    async def _take(self, offer: Offer, spooled: Spooled, inspection: Inspection, digest: str) -> web.StreamResponse:
        """Check an update that is complete, tell the run, and add it."""
        try:
            return await self._check_and_add(offer, inspection, digest)
        finally:
            spooled.close()

    async def _check_and_add(self, offer: Offer, inspection: Inspection, digest: str) -> web.StreamResponse:
        run = self._run
        update = await inspection.finish()
        if update.digest != digest:
            raise OptionError(DIGEST_HEADER, digest, "that of the body, which came in damaged")
        if not math.isfinite(update.largest):
            raise OptionError("update", "infinities or NaN in it", "finite")
        # Time has passed, and the round may be over. From here on nothing is waited for until it is announced.
        if (seen := run.seen(offer)) is not None:
            return self._again(seen)
        place = run.place_of(offer)
        if place is None:
            run.dropped(offer, time.monotonic())
            return self._receipt("dropped", 0)
        is_late = place != offer.round
        weight = run.weight_of(offer, place)
        if weight:
            sums = self._sum(place, offer.fragment)
            sums.begin(update, weight=weight)
        try:
            run.arrived(offer, time.monotonic(), into=place, weight=weight)
        finally:
            if weight:  # whatever has failed: a merge waits for what was begun
                await sums.add(update)
        return self._receipt(("late" if is_late else "added") if weight else "dropped", weight)

    def _sum(self, round: int, fragment: int) -> UpdateSum:
        sums = self._sums.get(round)
        if sums is None:
            if self.weights is None:
                raise RuntimeError("There are no weights to sum updates of.")
            sums = self._sums[round] = self.weights.sum_of(fragment)
        return sums

    async def settled(self, merge: Merge) -> UpdateSum | None:
        """The sum of a round that is to be merged, once everything that was announced is in it.

        What is still on its way for that round is cut where it could only be dropped: it holds room that others need.
        """
        if self._run.options.rounds.late == "drop":
            self._cut(lambda _, round: round <= merge.round)
        sums = self._sums.pop(merge.round, None)
        if sums is not None:
            await sums.settled()
            if sums.failed is not None:
                raise sums.failed
        return sums if merge.counts else None

    def _again(self, seen: Seen) -> web.Response:
        """Answer an update that was there before.

        One that is part of a later round is "late" again: in a round without a quorum, a worker sends what is not in a
        later one once more with its next update, and "again" alone would not tell it that this counts already.
        """
        self._run.count("updates_again")
        return self._receipt("late" if seen.is_late else "again", seen.weight)

    def _receipt(self, verdict: str, weight: int) -> web.Response:
        receipt = UpdateReceipt(verdict=verdict, weight=weight)
        return web.Response(text=encode_frame(receipt), content_type="application/json")

    # ── Means ───────────────────────────────────────────────────────────

    async def get(self, request: web.Request, member: Member) -> web.StreamResponse:
        """Hand out the mean of a round."""
        round, fragment = _place_in(request.match_info)
        mean = None if self.weights is None else self.weights.kept(round)
        if mean is None or mean.fragment != fragment or round > self._run.lineage.version:
            has_ended = round <= self._run.lineage.version
            why = "is kept no longer" if has_ended else "has not ended"
            return problem(404, f"There is no mean of fragment {fragment} in round {round}: it {why}.")
        response = web.StreamResponse(headers=self._headers(mean))
        response.content_type = "application/octet-stream"
        response.content_length = mean.payload.numel()
        await response.prepare(request)
        await self._send(response, mean)
        self._run.tally(member.name).bytes_out += mean.payload.numel()
        return response

    def _headers(self, mean: KeptMean) -> dict[str, str]:
        return {
            TOTAL_HEADER: str(mean.total),
            DIGEST_HEADER: mean.digest,
            CHAIN_HEADER: self._run.lineage.chains.get(mean.round, ""),
        }

    async def _send(self, response: web.StreamResponse, mean: KeptMean) -> None:
        view = view_of(mean.payload)
        task = asyncio.current_task()
        self._downloads += 1
        try:
            await self._send_view(response, view, task)
        finally:
            self._downloads -= 1
        self._run.count("bytes_out", len(view))

    async def _send_view(
        self, response: web.StreamResponse, view: memoryview, task: asyncio.Task[object] | None
    ) -> None:
        with self._stalls.watch(task.cancel if task is not None else bool) as transfer:
            for start in range(0, len(view), _CHUNK):
                await response.write(view[start : start + _CHUNK])
                transfer.moved = True
            await response.write_eof()

    async def give_way(self, mean: KeptMean) -> None:
        """Let a large mean go out first, for a second at most: workers wait for it, and for the outer step nobody."""
        if mean.payload.numel() < _LARGE:
            return
        began = time.monotonic()
        await asyncio.sleep(_ASKED_S)  # workers hear of the round's end
        while self._downloads and time.monotonic() - began < _LONGEST_S:
            await asyncio.sleep(_LOOK_S)


def _place_in(path: Mapping[str, str]) -> tuple[int, int]:
    return int(path["round"]), int(path["fragment"])


def _offer_of(request: web.Request, member: Member) -> Offer:
    round, fragment = _place_in(request.match_info)
    samples = _whole(request.headers, SAMPLES_HEADER)
    return Offer(
        member=member,
        round=round,
        fragment=fragment,
        samples=samples,
        steps=_whole(request.headers, STEPS_HEADER),
        tokens=_whole(request.headers, TOKENS_HEADER, default=0),
        round_samples=_whole(request.headers, ROUND_SAMPLES_HEADER, default=samples),
    )


def _whole(headers: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = headers.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) > MOST:
        raise OptionError(name, text, f"a whole number from 0 to {MOST}")
    return int(text)


_STALLED_SECONDS = 60.0
_HEADER_BYTES = 4096  # of a safetensors file, and for each parameter


def state_bytes(model: tuple[ModelParameter, ...]) -> int:
    """The most bytes that weights and momentum of a model take as a safetensors file, in fp64."""
    numbers = 0
    for one in model:
        size = 1
        for length in one.shape:
            size *= length
        numbers += size
    return 2 * 8 * numbers + _HEADER_BYTES * (2 * len(model) + 1)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors in a safetensors file.

    Raises:
        OptionError: If it is none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise OptionError("weights", "what came in", f"a safetensors file ({error})") from error


class StateRoutes:
    """Hands out the state, as a temporary file without a name: a slow worker holds no memory, and up no step.

    On the event loop.

    Args:
        run: The core of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written: tuple[int, str, IO[bytes]] | None = None  # version, chain; without a name
        self._writing = asyncio.Lock()

    async def get(
        self, request: web.Request, member: Member, weights: GlobalWeights, still: asyncio.Lock
    ) -> web.StreamResponse:
        """Send the state.

        Args:
            request: Of a worker.
            member: Who it is.
            weights: The global weights.
            still: Held while weights are read, so that no step changes them.
        """
        async with self._writing:
            async with still:
                version, chain = self._run.lineage.version, self._run.lineage.chain
                is_new = self._written is None or self._written[:2] != (version, chain)
                snapshot = await weights.snapshot() if is_new else None
            if snapshot is not None:  # of the moment; a slow disk does not hold up the next step
                written = await asyncio.get_running_loop().run_in_executor(None, self._write, snapshot.named())
                del snapshot
                self.forget()
                self._written = (version, chain, written)
            if self._written is None:
                raise RuntimeError("The state was forgotten while it was written.")
            file = os.dup(self._written[2].fileno())  # closed below, also where the other one is by then
        try:
            response = web.StreamResponse(headers={VERSION_HEADER: str(version), CHAIN_HEADER: chain})
            response.content_type = "application/octet-stream"
            response.content_length = os.fstat(file).st_size
            await response.prepare(request)
            loop, sent = asyncio.get_running_loop(), 0
            while chunk := await loop.run_in_executor(None, os.pread, file, 1 << 20, sent):
                await asyncio.wait_for(response.write(chunk), _STALLED_SECONDS)
                sent += len(chunk)
            self._run.count("bytes_out", sent)
            self._run.tally(member.name).bytes_out += sent
            await response.write_eof()
            return response
        finally:
            os.close(file)

    def _write(self, tensors: Mapping[str, Tensor]) -> IO[bytes]:
        from safetensors.torch import save_file

        descriptor, name = tempfile.mkstemp(prefix="bytescheduler-state-", suffix=".safetensors")
        os.close(descriptor)
        try:
            save_file(dict(tensors), name)
            return open(name, "rb")  # kept until the next version
        finally:  # nothing is left behind, whatever ends this process
            Path(name).unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete what was written; who reads it goes on."""
        if self._written is not None:
            self._written[2].close()
            self._written = None

    async def put(self, request: web.Request) -> dict[str, Tensor] | web.Response:
        """Take weights of the worker that was asked for them: the tensors, or what is wrong."""
        import xxhash

        limit = state_bytes(self._run.model)
        length = request.content_length
        if length is None or not 8 <= length <= limit:
            return problem(413, f"Content-Length={length} is not allowed: these weights take {limit} bytes at most.")
        digest = request.headers.get(DIGEST_HEADER)
        with tempfile.NamedTemporaryFile(prefix="bytescheduler-weights-") as file:
            left = length
            loop = asyncio.get_running_loop()
            state = xxhash.xxh3_128()
            while left > 0:
                chunk = await asyncio.wait_for(request.content.readany(), _STALLED_SECONDS)
                if not chunk and request.content.at_eof():
                    return problem(400, "The weights did not come in whole.")
                left -= len(chunk)
                state.update(chunk)
                await loop.run_in_executor(None, file.write, chunk)
            if left < 0:  # as what was compressed may be
                return problem(413, f"The weights are more than Content-Length={length} announced.")
            file.flush()
            if digest is not None and digest != state.hexdigest():
                return problem(400, "The weights came in damaged: their digest is another one.")
            try:
                return await loop.run_in_executor(None, read_weights, file.name)
            except OptionError as error:
                return problem(422, str(error))
