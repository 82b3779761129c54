"""The state down, and the first weights up: ``STATE_PATH``.

What goes down is a temporary file, one for each version that somebody asks for, without a name once it is
open: a slow worker holds a file, not memory, and never holds up the next outer step.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.global_weights import GlobalWeights
from lightning_bytescheduler.coordinator.replies import problem
from lightning_bytescheduler.coordinator.run import Run
from lightning_bytescheduler.diloco.coordinator_protocol import (
    CHAIN_HEADER,
    DIGEST_HEADER,
    VERSION_HEADER,
    ModelParameter,
)
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["StateRoutes", "read_weights", "state_bytes"]

_CHUNK = 1 << 18
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
    with importing("The coordinator", extra="coordinator"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise OptionError("weights", "what came in", f"a safetensors file ({error})") from error


class StateRoutes:
    """Hands out the state. On the event loop.

    Args:
        run: The core of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written: tuple[int, str, Path] | None = None  # version, chain
        self._writing = asyncio.Lock()

    async def get(self, request: web.Request, weights: GlobalWeights, still: asyncio.Lock) -> web.StreamResponse:
        """Send the state.

        Args:
            request: Of a worker.
            weights: The global weights.
            still: Held while weights are read, so that no step changes them.
        """
        async with self._writing:
            async with still:
                version, chain = self._run.lineage.version, self._run.lineage.chain
                is_new = self._written is None or self._written[:2] != (version, chain)
                snapshot = await weights.snapshot() if is_new else None
            if snapshot is not None:  # of the moment; a slow disk does not hold up the next step
                path = await asyncio.get_running_loop().run_in_executor(None, self._write, snapshot.named())
                del snapshot
                self.forget()
                self._written = (version, chain, path)
            if self._written is None:
                raise RuntimeError("The state was forgotten while it was written.")
            file = open(self._written[2], "rb")  # noqa: SIM115  # of this machine; closed below
        with file:
            response = web.StreamResponse(headers={VERSION_HEADER: str(version), CHAIN_HEADER: chain})
            response.content_type = "application/octet-stream"
            response.content_length = os.fstat(file.fileno()).st_size
            await response.prepare(request)
            if request.method == "HEAD":
                return response
            while chunk := await asyncio.get_running_loop().run_in_executor(None, file.read, _CHUNK * 4):
                await asyncio.wait_for(response.write(chunk), _STALLED_SECONDS)
                self._run.count("bytes_out", len(chunk))
            await response.write_eof()
            return response

    def _write(self, tensors: Mapping[str, Tensor]) -> Path:
        with importing("The coordinator", extra="coordinator"):
            from safetensors.torch import save_file
        descriptor, name = tempfile.mkstemp(prefix="bytescheduler-state-", suffix=".safetensors")
        os.close(descriptor)
        try:
            save_file(dict(tensors), name)
        except BaseException:  # as on a disk that is full: whoever asks again would leave one more
            Path(name).unlink(missing_ok=True)
            raise
        return Path(name)

    def forget(self) -> None:
        """Delete what was written; who reads it goes on."""
        if self._written is not None:
            self._written[2].unlink(missing_ok=True)
            self._written = None

    async def put(self, request: web.Request) -> dict[str, Tensor] | web.Response:
        """Take weights of the worker that was asked for them: the tensors, or what is wrong."""
        limit = state_bytes(self._run.model)
        length = request.content_length
        if length is None or not 8 <= length <= limit:
            return problem(413, f"Content-Length={length} is not allowed: these weights take {limit} bytes at most.")
        digest = request.headers.get(DIGEST_HEADER)
        with tempfile.NamedTemporaryFile(prefix="bytescheduler-weights-") as file:
            left = length
            loop = asyncio.get_running_loop()
            state = _hash()
            while left:
                chunk = await asyncio.wait_for(request.content.readany(), _STALLED_SECONDS)
                if not chunk and request.content.at_eof():
                    return problem(400, "The weights did not come in whole.")
                left -= len(chunk)
                state.update(chunk)
                await loop.run_in_executor(None, file.write, chunk)
            file.flush()
            if digest is not None and digest != state.hexdigest():
                return problem(422, "The weights came in damaged: their digest is another one.")
            try:
                return await loop.run_in_executor(None, read_weights, file.name)
            except OptionError as error:
                return problem(422, str(error))


def _hash() -> Any:
    with importing("The coordinator", extra="coordinator"):
        import xxhash
    return xxhash.xxh3_128()
