"""Bulk traffic: updates up, means and the state down, and the first weights up.

Uploads are checked (length, digest, every value) before they count. An update is then added to its sum in threads; a
merge waits for additions under way, so that the record of a round says what is in its sum. A connection that dies
half-way leaves nothing.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from aiohttp import web
from torch import Tensor

from lightning_bytescheduler.coordinator.connection import Stalls
from lightning_bytescheduler.coordinator.global_weights import RESIDUALS, GlobalWeights
from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.run import Merge, Offer, Place, Run
from lightning_bytescheduler.coordinator.update_sum import UpdateSum, Upload, UploadRoom, view_of
from lightning_bytescheduler.diloco.coordinator_protocol import (
    CHAIN_HEADER,
    DIGEST_HEADER,
    ROUND_SAMPLES_HEADER,
    SAMPLES_HEADER,
    STEPS_HEADER,
    TOTAL_HEADER,
    TRAINED_HEADER,
    VERSION_HEADER,
    ModelParameter,
    UpdateReceipt,
    encode_frame,
)
from lightning_bytescheduler.diloco.messages import MOST
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.tracker import TrainedRun


def problem(status: int, error: str, *, retry_after: float | None = None) -> web.Response:
    """Return an answer that says what is wrong.

    Args:
        status: The HTTP status.
        error: What is wrong, in words.
        retry_after: Seconds after which the client may try again.
    """
    headers = {} if retry_after is None else {"Retry-After": str(max(round(retry_after), 1))}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


_ROOM_SECONDS = 5.0
_CHUNK = 1 << 18
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST_TRAINED_BYTES = 1 << 20
_TRAINED = msgspec.json.Decoder(tuple[TrainedRun, ...])
_LARGE = 1 << 24  # bytes of a mean whose sending takes as long as a step
_ASKED_S, _LOOK_S, _LONGEST_S = 0.05, 0.01, 1.0


class BulkRoutes:
    """Takes updates and the first weights, and hands out means and the state, for one run. On the event loop.

    Args:
        run: The core of the run.
        room: Memory for uploads, until they are added.
        stalls: Cuts off transfers that stall.
        begin: Called with the first weights, as ``GlobalWeights`` takes them.
    """

    def __init__(
        self,
        run: Run,
        room: UploadRoom,
        stalls: Stalls,
        begin: Callable[[Mapping[str, Tensor]], Awaitable[None]],
    ) -> None:
        self._run = run
        self._room = room
        self._stalls = stalls
        self._begin = begin
        self.weights: GlobalWeights | None = None
        self._sums: dict[int, UpdateSum] = {}
        self._uploads: dict[tuple[str, int], asyncio.Task[object]] = {}  # by worker and round
        self._downloads = 0  # of means, under way
        self._written = (-1, "", memoryview(b""))  # version, chain, and the state in a nameless file
        self._writing = asyncio.Lock()
        self._providing = False  # the first weights are coming in

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
            seen = self._run.contributions.seen(offer)
            place = self._run.place_of(offer) if seen is None else seen
            trained_bytes = _whole(request.headers, TRAINED_HEADER, default=0)
            if trained_bytes > _MOST_TRAINED_BYTES:
                raise OptionError(TRAINED_HEADER, trained_bytes, f"{_MOST_TRAINED_BYTES} bytes at most")
            expected = weights.formats[offer.fragment].payload_bytes + trained_bytes
            if request.content_length != expected:
                allowed = f"{expected}, the size of fragment {offer.fragment} and of {TRAINED_HEADER}"
                raise OptionError("Content-Length", request.content_length, allowed)
        except OptionError as error:
            self._run.count("updates_refused")
            return problem(409 if error.option in ("round", "fragment") else 400, str(error))
        if seen is not None:
            return self._again(seen)
        if place.is_late:
            self._run.arrived(offer, time.monotonic(), place)
            return _receipt("dropped", 0)
        self._run.sending(offer, time.monotonic())
        return await self._alone(request, weights, offer, digest, trained_bytes)

    @property
    def uploading(self) -> set[str]:
        """Names of workers whose updates are coming in."""
        return {name for name, _ in self._uploads}

    def cut(self, member: Member) -> None:
        """End the uploads of a worker that has gone."""
        self._cut(lambda name, _: name == member.name)

    def _cut(self, concerns: Callable[[str, int], bool]) -> None:
        for (name, round), task in list(self._uploads.items()):
            if concerns(name, round):
                task.cancel()

    async def _alone(
        self, request: web.Request, weights: GlobalWeights, offer: Offer, digest: str, trained_bytes: int
    ) -> web.StreamResponse:
        """Take a worker's update. An earlier, incomplete upload of it came by a dead connection, and is ended."""
        key = (offer.member.name, offer.round)
        former, task = self._uploads.get(key), asyncio.current_task()
        if former is not None:
            former.cancel()
        if task is not None:
            self._uploads[key] = task
        try:
            try:
                if trained_bytes:
                    offer = msgspec.structs.replace(offer, trained=await self._trained_in(request, trained_bytes))
                upload = await self._room.take(weights.formats[offer.fragment], timeout=_ROOM_SECONDS)
                await self._receive(request, upload)
            finally:
                if self._uploads.get(key) is task:
                    del self._uploads[key]
            self._run.count("bytes_in", upload.length)
            offer.member.bytes_in += upload.length
            # The update is complete, so it counts even if the worker goes away now.
            return await asyncio.shield(self._take(offer, upload, digest))
        except OptionError as error:
            self._run.count("updates_refused")
            return problem(422, str(error))
        except web.HTTPException:
            self._run.count("updates_broken")
            raise

    async def _trained_in(self, request: web.Request, length: int) -> tuple[TrainedRun, ...]:
        """Read the samples that an update was made of; they come before it in the body."""
        found = bytearray()
        await self._read(request.content.read, length, found.extend)
        try:
            return _TRAINED.decode(found)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise OptionError("update", "its beginning", f"preceded by a list of samples ({error})") from error

    async def _receive(self, request: web.Request, upload: Upload) -> None:
        """Receive the rest of a body; give its room back unless the body comes in whole."""
        try:
            # Reads are not limited to the announced length, as this is the body's last part. So a longer body, such as
            # a compressed one, is refused by ``write``.
            await self._read(lambda _: request.content.readany(), upload.length, upload.write)
        except BaseException:
            upload.close()
            raise

    async def _read(
        self, read: Callable[[int], Awaitable[bytes]], length: int, write: Callable[[bytes], object]
    ) -> None:
        """Pass ``length`` bytes of a body to ``write`` as they come."""
        try:
            with self._stalls.watch() as transfer:
                while length > 0:
                    chunk = await read(length)
                    if not chunk:
                        raise ConnectionError("The body ended early.")
                    transfer.moved = True
                    length -= len(chunk)
                    write(chunk)
        except ConnectionError as error:
            raise web.HTTPBadRequest(text=f"The body did not come in whole: {type(error).__name__}.") from error

    async def _take(self, offer: Offer, upload: Upload, digest: str) -> web.StreamResponse:
        """Check an update that is complete, tell the run, and add it."""
        run = self._run
        with upload:
            update = await upload.finish()
            if update.digest != digest:
                raise OptionError(DIGEST_HEADER, digest, "that of the body, which came in damaged")
            if not math.isfinite(update.largest):
                raise OptionError("update", "infinities or NaN in it", "finite")
            # Time has passed, and the round may be over. There is no await from here until the update is announced.
            if (seen := run.contributions.seen(offer)) is not None:
                return self._again(seen)
            place = run.place_of(offer)
            if place.weight:
                sums = self._sum(offer.round, offer.fragment)
                sums.begin(update, weight=place.weight)
            try:
                run.arrived(offer, time.monotonic(), place)
            finally:
                if place.weight:  # even after an error, as a merge waits for each update that was begun
                    await sums.add(update)
        return _receipt("added" if place.weight else "dropped", place.weight)

    def _sum(self, round: int, fragment: int) -> UpdateSum:
        sums = self._sums.get(round)
        if sums is None:
            if self.weights is None:
                raise RuntimeError("Updates cannot be summed before there are weights.")
            sums = self._sums[round] = self.weights.sum_of(fragment)
        return sums

    async def settled(self, merge: Merge) -> UpdateSum | None:
        """Return the sum of a round to merge, once all announced updates are in it.

        Uploads under way for that round or earlier ones are cut: they hold room, and would only be dropped.
        """
        self._cut(lambda _, round: round <= merge.round)
        sums = self._sums.pop(merge.round, None)
        if sums is not None:
            await sums.settled()
            if sums.failed is not None:
                raise sums.failed
        return sums if merge.counts else None

    def _again(self, seen: Place) -> web.Response:
        """Answer an update that has come before."""
        self._run.count("updates_again")
        return _receipt("again", seen.weight)

    # ── Means ───────────────────────────────────────────────────────────

    async def get(self, request: web.Request, member: Member) -> web.StreamResponse:
        """Hand out the mean of a round."""
        round, fragment = _place_in(request.match_info)
        lineage = self._run.lineage
        mean = None if self.weights is None else self.weights.kept(round)
        if mean is None or mean.fragment != fragment or round > lineage.version:
            why = "was dropped" if round <= lineage.version else "has not ended"
            return problem(404, f"There is no mean of fragment {fragment} in round {round}: it {why}.")
        said = {TOTAL_HEADER: str(mean.total), DIGEST_HEADER: mean.digest, CHAIN_HEADER: lineage.chains.get(round, "")}
        self._downloads += 1
        try:
            view = memoryview(b"") if mean.payload is None else view_of(mean.payload)
            return await self._send(request, member, view, said, on_disk=False)
        finally:
            self._downloads -= 1

    async def _send(
        self, request: web.Request, member: Member, view: memoryview, headers: Mapping[str, str], *, on_disk: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = len(view)
        with self._stalls.watch() as transfer:
            await response.prepare(request)
            for start in range(0, len(view), _CHUNK):
                chunk: bytes | memoryview = view[start : start + _CHUNK]
                if on_disk:  # others go on while it is read
                    chunk = await asyncio.get_running_loop().run_in_executor(None, bytes, chunk)
                await response.write(chunk)
                transfer.moved = True
            await response.write_eof()
        self._run.count("bytes_out", len(view))
        member.bytes_out += len(view)
        return response

    async def give_way(self, merge: Merge) -> None:
        """Let a large mean go out before the outer step, for a second at most: workers wait only for the mean."""
        if merge.payload is None or merge.payload.numel() < _LARGE:
            return
        began = time.monotonic()
        await asyncio.sleep(_ASKED_S)  # until workers have heard of the round's end, and ask for the mean
        while self._downloads and time.monotonic() - began < _LONGEST_S:
            await asyncio.sleep(_LOOK_S)

    # ── The state ───────────────────────────────────────────────────────────

    async def get_state(self, request: web.Request, member: Member) -> web.StreamResponse:
        """Hand out the state from a file, so that a slow worker neither holds memory nor delays a step."""
        weights, lineage = self.weights, self._run.lineage
        if weights is None and self._providing:
            return problem(503, "Another worker is sending the first weights.", retry_after=1)
        if weights is None:
            return problem(404, "There are no weights yet: send the first ones.")
        async with self._writing:
            async with weights.still:
                now = lineage.version, lineage.chain
                snapshot = None if self._written[:2] == now else await weights.snapshot()
            if snapshot is not None:  # a copy, so that a slow disk does not delay the next step
                snapshot = {name: tensor for name, tensor in snapshot.items() if not name.startswith(RESIDUALS)}
                self._written = (*now, await asyncio.get_running_loop().run_in_executor(None, _in_a_file, snapshot))
                del snapshot
            version, chain, state = self._written
        said = {VERSION_HEADER: str(version), CHAIN_HEADER: chain}
        return await self._send(request, member, state, said, on_disk=True)

    async def put_state(self, request: web.Request, member: Member) -> web.StreamResponse:
        """Take the first weights from the worker that sends them first."""
        if self.weights is not None or self._providing:
            return problem(409, "The first weights are there, or another worker is sending them.")
        limit, length = state_bytes(self._run.model), request.content_length
        if length is None or not 8 <= length <= limit:
            return problem(413, f"Content-Length={length} is not allowed: these weights take {limit} bytes at most.")
        self._providing = True
        try:
            await self._begin(await self._weights_in(request, length))
        except OptionError as error:
            return problem(422, str(error))
        finally:
            self._providing = False
        return web.json_response({"parameters": 0 if self.weights is None else self.weights.parameters})

    async def _weights_in(self, request: web.Request, length: int) -> dict[str, Tensor]:
        """Return the weights in a body. Its room is free afterwards."""
        upload = await self._room.take(length, timeout=_ROOM_SECONDS)
        await self._receive(request, upload)
        with upload:
            update = await upload.finish()
            if request.headers.get(DIGEST_HEADER, update.digest) != update.digest:
                raise web.HTTPBadRequest(text="The weights came in damaged: their digest is another one.")
            return await asyncio.get_running_loop().run_in_executor(None, _tensors_in, update.payload)


def _receipt(verdict: str, weight: int) -> web.Response:
    return web.Response(
        text=encode_frame(UpdateReceipt(verdict=verdict, weight=weight)), content_type="application/json"
    )


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
        round_samples=_whole(request.headers, ROUND_SAMPLES_HEADER, default=samples),
    )


def _whole(headers: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = headers.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) > MOST:
        raise OptionError(name, text, f"a whole number from 0 to {MOST}")
    return int(text)


_HEADER_BYTES = 4096  # most bytes of a safetensors header, in all and for each tensor


def state_bytes(model: tuple[ModelParameter, ...]) -> int:
    """The most bytes that weights and momentum of a model take as a safetensors file, in fp64."""
    numbers = sum(math.prod(one.shape) for one in model)
    return 2 * 8 * numbers + _HEADER_BYTES * (2 * len(model) + 1)


def _tensors_in(payload: Tensor) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(bytes(view_of(payload)))
    except (SafetensorError, ValueError, KeyError) as error:
        raise OptionError("weights", "what came in", f"a safetensors file ({error})") from error


def _in_a_file(tensors: Mapping[str, Tensor]) -> memoryview:
    """Tensors as safetensors, in a temporary file without a name: nothing is left, whatever ends this process."""
    from safetensors.torch import save_file

    descriptor, name = tempfile.mkstemp(prefix="bytescheduler-state-", suffix=".safetensors")
    os.close(descriptor)
    try:
        save_file(dict(tensors), name)
        with open(name, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    finally:
        Path(name).unlink(missing_ok=True)
