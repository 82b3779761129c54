"""Where on a GPU the steps of optimizers are enqueued, whoever opens a gate; on a CPU nothing happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["TrainingStream"]

_HERE: AbstractContextManager[None] = nullcontext()


class TrainingStream:
    """The stream that a training's optimizer steps belong to; on a CPU nothing happens.

    A gate may be opened on any stream and thread: by a forward pass, by a callback that copies weights on a stream of
    its own. The step is then enqueued where ``optimizer.step()`` was called, behind all else of the training, and the
    stream that opened the gate waits for it.

    Its limit: a gate opens for all parameters of a bucket. Who reads another one of them on a stream that is neither
    the training's nor the one that opened the gate has to make it wait for the training's, and after the gate was
    opened; a wait at the start of the forward pass is too early.

    Args:
        device: Where the parameters live.
        cuda: Streams; replaced by tests.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream: Any = None

    def is_here(self) -> None:
        """The training goes on where the caller is; called by whoever trains."""
        if self._device.type == "cuda":
            self._stream = self._cuda.current_stream(self._device)

    def entered(self) -> AbstractContextManager[None]:
        """Enqueue on the training's stream; afterwards the caller's stream waits for that."""
        return _HERE if self._stream is None else self._moved()

    @contextmanager
    def _moved(self) -> Iterator[None]:
        here = self._cuda.current_stream(self._device)
        if here == self._stream:
            yield
            return
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)
