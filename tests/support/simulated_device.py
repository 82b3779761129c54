"""A simulated device for tensors: operations run on a CPU, if a GPU would do them.

A tensor of it says that it is on ``DEVICE``, refuses to meet tensors of host memory but for copies, and has no NumPy.
So what mixes them up by luck on a CPU goes wrong here. Payloads are copied to host memory late, in any order that
streams and events allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bytescheduler.compression import dense
from lightning_bytescheduler.ddp import wire
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.reduction import GradientBucket, Reduction, ShardedReduction
from tests.support.late_copies import LateCopies, by_host

__all__ = ["DEVICE", "LatePayloads", "OnDevice", "on_device", "simulated"]

DEVICE = torch.device("meta")  # torch knows its name wherever it runs, and nothing that is tested uses it
_COPIES = ("aten::_to_copy", "aten::copy_")


class OnDevice(Tensor):
    """A tensor of the device.

    Args:
        contents: In host memory: has its values, and what is written to it.
    """

    contents: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, contents: Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            contents.shape,
            strides=contents.stride(),
            storage_offset=contents.storage_offset(),
            dtype=contents.dtype,
            device=DEVICE,
        )
        made.contents = contents.detach()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _done(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.contents.tolist()


class _Simulated(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name, asked = func._schema.name, kwargs.get("device")
    met: list[Tensor] = []
    inner_args = [_contents(value, met) for value in args]
    inner_kwargs = {key: _contents(value, met) for key, value in kwargs.items()}
    here = any(isinstance(tensor, OnDevice) for tensor in met)
    if here and name not in _COPIES and any(t.dim() and not isinstance(t, OnDevice) for t in met):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device.")
    if asked is not None:
        inner_kwargs["device"] = "cpu"
    found = func(*inner_args, **inner_kwargs)
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if name.endswith("_") and func._schema.is_mutable:
        return args[0]
    if (torch.device(asked) != DEVICE) if asked is not None else not here:
        return found
    return _there_again(found)


def _contents(value: Any, met: list[Tensor]) -> Any:
    """What it is in host memory; its tensors are added to ``met``. Torch's tree_map takes longer than the work."""
    if isinstance(value, Tensor):
        met.append(value)
        return value.contents if isinstance(value, OnDevice) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_contents(one, met) for one in value)
    return value


def _there_again(found: Any) -> Any:
    if isinstance(found, Tensor):
        return OnDevice(found)
    if isinstance(found, (list, tuple)):
        return type(found)(_there_again(one) for one in found)
    return found


@contextmanager
def simulated() -> Iterator[None]:
    """Have this thread make tensors of the device, and draw random numbers there."""

    def generator_on(device: torch.device, *seed: int) -> torch.Generator:
        return original(torch.device("cpu"), *seed)

    original = dense.generator_on
    with (
        patch.object(dense, "generator_on", generator_on),
        _Simulated(),
    ):
        yield


class LatePayloads(LateCopies):
    """Copies to host memory that are made late."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(DEVICE)

    @contextmanager
    def working(self) -> Iterator[None]:
        with _Simulated(), super().working():
            yield

    def _copied(self, payload: Tensor, there: Tensor) -> Tensor:
        if there.device == DEVICE:
            return there.copy_(payload)  # what is done to it next does not wait
        assert isinstance(payload, OnDevice)
        return super()._copied(payload, there)


@contextmanager
def on_device() -> Iterator[None]:
    """Have gradients be encoded on the device, and travel from host memory."""

    def generator_on(device: torch.device, *seed: int) -> torch.Generator:
        return draws(torch.device("cpu"), *seed)

    draws, work_on = dense.generator_on, GradientCompression.work_on
    with ExitStack() as stack:
        stack.enter_context(by_host())
        stack.enter_context(patch.object(GradientCompression, "work_on", work_on))
        stack.enter_context(patch.object(wire, "PayloadCopies", LatePayloads))
        for kind in (Reduction, ShardedReduction):
            stack.enter_context(patch.object(kind, "reduce", _from_device(kind.reduce)))
        stack.enter_context(patch.object(dense, "generator_on", generator_on))
        stack.enter_context(patch.object(GradientCompression, "encoded", _there(GradientCompression.encoded)))
        yield


def _from_device(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a bucket that is on the device."""

    def reducing(self: Any, bucket: GradientBucket, *more: Any) -> Any:
        if not isinstance(bucket.buffer, OnDevice):
            bucket = GradientBucket(bucket.index, bucket.parameters, OnDevice(bucket.buffer), bucket.priority)
        return reduce(self, bucket, *more)

    return reducing


def _there(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with tensors of the device: on a GPU that takes no more than its name."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _Simulated():
            return method(*args, **kwargs)

    return wrapped
