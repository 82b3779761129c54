"""Observes when parameters are read and whether a gate sees it, and tells the user which reads cost something.

The order of first use is the priority of buckets. Parameters that are read without a touch are found in the first
iteration, in later ones (:class:`Reads`) or by references to them (:class:`AliasDetector`). Code that reads weights or
gradients between steps costs overlap, which is said once (:class:`SeenReads`).
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.ddp.gates import arm, can_be_gated, disarm, gate_of, is_armed
from lightning_bytescheduler.lightning_api import rank_zero_info

_storage_of = torch.Tensor.untyped_storage


def _read_count(address: int) -> int:
    """Read the count with which every reference-counted PyTorch object begins, after its virtual method table."""
    return ctypes.c_uint32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value


# Before 2.9 only builds for CUDA have the function. Both ways are tested below before they are trusted.
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read_count)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Count the references to the memory of ``tensor``. Without an alias these are its own and this function's."""
    storage = _storage_of(tensor)  # keeps the Python object alive while it is counted, as in every other count
    return _use_count(storage._cdata)


def _words(storage: torch.UntypedStorage) -> list[int]:
    """Return the first words of a storage object: among them are the address of the memory and that of its owner."""
    size = ctypes.sizeof(ctypes.c_void_p)
    return [ctypes.c_size_t.from_address(storage._cdata + size * n).value for n in range(1, 6)]


def _places_of(address: int, words: list[int]) -> list[int]:
    return [place for place, word in enumerate(words) if word == address]


def _place_of_owner() -> int | None:
    """Find which word holds the owner's address; ``None`` if unknown. PyTorch's own host memory owns itself."""
    own, foreign = (
        torch.zeros(3, dtype=torch.float32).untyped_storage(),
        torch.frombuffer(bytearray(12), dtype=torch.uint8).untyped_storage(),
    )
    twice, once = (_places_of(one.data_ptr(), _words(one)) for one in (own, foreign))
    return twice[1] if len(twice) == 2 and once == twice[:1] else None


_OWNER = _place_of_owner()


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether other code owns memory that PyTorch cannot resize or shares: NumPy, a mapped file, another process.

    What was loaded, or was once seen by NumPy, cannot be resized either, but belongs to this process alone.
    """
    return _OWNER is None or storage.device.type != "cpu" or _words(storage)[_OWNER] != storage.data_ptr()


# Versions of PyTorch differ in the references that they hold themselves, so these are measured.
_ALONE = references_to_memory(torch.zeros(1, dtype=torch.float32))


def aliases_are_seen() -> bool:
    """Whether this version of PyTorch counts each alias as one more reference, as long as it lives."""
    tensor = torch.zeros(1, dtype=torch.float32)
    aliases = [tensor.detach() for _ in range(3)]
    counted = references_to_memory(tensor)
    aliases.clear()
    return (counted, references_to_memory(tensor)) == (_ALONE + 3, _ALONE)


def held_beside(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` has an alias. No two of them may share memory. Opens no gate."""
    alone, use_count, storage_of = _ALONE, _use_count, _storage_of
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            use_count((storage := storage_of(t))._cdata) > alone or (t.is_cpu and storage.is_shared()) for t in tensors
        )


def kept_elsewhere(of: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the pairs whose second tensor's memory is held by more than those tensors."""
    dense = [(p, g) for p, g in of if g.layout is torch.strided]
    sharing = Counter(_storage_of(g)._cdata for _, g in dense)
    return [(p, g) for p, g in dense if references_to_memory(g) > _ALONE - 1 + sharing[_storage_of(g)._cdata]]


class AliasDetector:
    """Finds the parameters that have an alias.

    A touch gate sits on the Python object of a parameter. An alias of its memory (``.data``, ``state_dict()``,
    ``.numpy()``) can be read without a touch and would show weights before their deferred update. Every tensor over a
    storage holds a reference to it, and PyTorch counts these references. A count higher than the parameter itself needs
    means that there is an alias. Memory that PyTorch did not allocate (NumPy arrays, mapped files, shared memory) has
    other readers, so it counts as aliased.

    ``optimizer.state_dict()`` returns the dictionaries and tensors that the optimizer works with. Code that keeps one
    of them, or an alias of such a tensor, sees new moments right after each step under DDP. A deferred step would show
    there late. The same counts reveal this.

    Not detected: memory of which only the address is known (``data_ptr()``), a storage that is kept
    (``untyped_storage()``), and GPU memory that another process has opened. A graph that is kept after its backward
    pass also holds references; that costs overlap and nothing else.

    Args:
        parameters: Parameters to watch; those that cannot be gated are skipped. They may share memory with each other.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if can_be_gated(p) and p.layout is torch.strided and p.numel()]

    def find(self) -> set[int]:
        """Return the ids of parameters that have an alias. Opens no gate."""
        alone, use_count, storage_of = _ALONE, _use_count, _storage_of
        found: set[int] = set()
        held: list[tuple[nn.Parameter, torch.Tensor]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for p in self._parameters:
                storage = storage_of(p)
                if (not storage.resizable() or (p.is_cpu and storage.is_shared())) and is_foreign(storage):
                    found.add(id(p))
                elif use_count(storage._cdata) > alone:
                    held.append((p, p))
            found.update(id(p) for p, _ in kept_elsewhere(held))
        return found


_scripts: list[tuple[weakref.ref[Any], list[int]]] = []  # with the ids of the modules' parameters


def note_script(script: object, module: nn.Module) -> None:
    """Record that ``script`` was made of ``module``: while it lives, it reads the module's parameters unseen."""
    if ids := [id(parameter) for parameter in module.parameters()]:
        _scripts.append((weakref.ref(script), ids))


def scripted_parameters() -> set[int]:
    """Return the ids of parameters that living scripted or traced modules read."""
    if not _scripts:
        return set()
    _scripts[:] = [(script, ids) for script, ids in _scripts if script() is not None]
    return {key for _, ids in _scripts for key in ids}


ENOUGH = 20  # steps that waited for the same reason, before a line is logged
_TOLD_APART_EVERY = 16  # steps


class SeenReads:
    """Counts steps that waited for all gradients although they overlap, and says each reason once.

    Nothing has to be declared: a callback that reads every hundred steps costs every hundredth step's overlap.

    Args:
        module: What is trained.
        rank: This rank.

    Attributes:
        waits: Number of steps that waited, by the reason in words.
        unseen: The step in which each parameter was found to be read past its gate, by its name.
    """

    def __init__(self, module: nn.Module | None = None, rank: int = 0) -> None:
        self._module = nn.Module() if module is None else module
        self._rank = rank
        self.waits: Counter[str] = Counter()
        self.unseen: dict[str, int] = {}

    def waited(self, why: str) -> None:
        """Count a step that waited for all gradients; ``why`` in words."""
        self.waits[why] += 1
        if self.waits[why] == ENOUGH:
            rank_zero_info(f"bytescheduler: {ENOUGH} steps waited for all gradients, because {why}.")

    def waited_early(self) -> None:
        """Count a reader that waits between two forward passes that train; on its thread, without a lock."""
        if self._module.training:
            hook = getattr(self._module, "_current_fx_name", None) or "code"  # set by Lightning
            self.waited(f"{hook} looks at weights or gradients between steps (looking less often keeps the overlap)")

    def read_unseen(self, parameters: list[nn.Parameter], step: int) -> None:
        """Warn that ``parameters`` were read past their gates in ``step``, maybe before the update."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        found = [names.get(id(p), "a parameter that the module no longer has") for p in parameters]
        self.unseen.update(dict.fromkeys(found, step))
        warnings.warn(
            f"bytescheduler: in step {step} on rank {self._rank}, code that takes a weight's memory past PyTorch's "
            f"functions read {some_of(found)}, for the first time after the first step: it may have had the weights "
            "of the step before, and then this training is not DDP's to the last bit. From here on their updates are "
            "waited for. To avoid it, hand such code weight.detach(), use it from the first step on, or train with "
            "cross_barrier=False.",
            stacklevel=2,
        )


class ForwardPass:
    """One forward pass that trains, until the next one begins.

    Attributes:
        read_early: Whether code has waited between its end and the start of the next pass.
    """

    __slots__ = ("read_early", "start", "under_way")

    def __init__(self, start: float, *, under_way: bool = True) -> None:
        self.start = start
        self.under_way = under_way
        self.read_early = False


class Reads:
    """All that is known of the reads of one fit's parameters; used under the fit's lock or on the training thread.

    *The order of use* is that of the first touches in the first forward pass that is observed, in which each parameter
    has a gate that only records its turn.

    *Unseen reads.* A parameter that nothing touched in this pass and that gets a gradient was read past its gate. Such
    reads may also begin later, as those of a kernel that is switched on: the update was pending, nothing touched the
    parameter in the forward pass, and it gets a gradient in the backward pass. A touch of one parameter opens its whole
    bucket, which hides reads of the others. So in one step out of sixteen these keep a gate that only records touches.

    Cost: one more touch of each parameter in one step out of sixteen. Not found: reads without a gradient, and a
    parameter that is read unseen and then touched in the same forward pass.

    Args:
        parameters: The trained parameters in registration order, which is also the order of untouched ones.
        by_first_use: Whether a bucket's position is its first use in the forward pass; if false, its index.

    Attributes:
        seen: Counts costly reads and reports them to the user.
        forward: The present or last forward pass.
        unseen: Ids of parameters that are read without a touch; their updates are taken in the step.
        held_elsewhere: Ids of parameters whose memory other code held at the last check.
        opened_for: What needed all gates open at once, with the number of steps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, by_first_use: bool = True) -> None:
        self._parameters = list(parameters)
        self.seen = SeenReads()
        self.forward = ForwardPass(0.0, under_way=False)
        self.unseen: set[int] = set()
        self.held_elsewhere: set[int] = set()
        self.opened_for: Counter[str] = Counter()
        self._aliases = AliasDetector(self._parameters)
        self._by_first_use = by_first_use
        self._registration = {id(p): index for index, p in enumerate(self._parameters)}
        self._position: dict[int, int] = {}
        self._observing = False  # whether this pass shows the order of use
        self._compiled: set[int] = set()  # touched in it by compiled code, which will not do so again
        self._untouched: list[nn.Parameter] = []  # in it, until its backward pass has been observed too
        self._apart = False  # whether this pass tells a bucket's parameters apart
        self._watched: dict[int, nn.Parameter] = {}  # with a gate that only records
        self._late: dict[int, nn.Parameter] = {}  # not touched in a pass that began with their updates pending
        self._with_gradient: set[int] = set()
        self._handles: list[Any] = []

    def position_of(self, index: int, parameters: Iterable[nn.Parameter]) -> int:
        """Return a bucket's position in the forward pass: its priority.

        It is the earliest position of its parameters. Parameters that are read unseen come first, as their step does
        not wait for the forward pass. Unused ones come last, in the order of registration.

        Args:
            index: The bucket's.
            parameters: The bucket's.
        """
        return min(map(self._position_of, parameters), default=0) if self._by_first_use else index

    def _position_of(self, parameter: nn.Parameter) -> int:
        key = id(parameter)
        if key in self.unseen:
            return -1
        return self._position.get(key, len(self._position) + self._registration.get(key, 0))

    def find_held(self) -> set[int]:
        """Return the ids of parameters whose memory other code can read."""
        self.held_elsewhere = self._aliases.find() | scripted_parameters()
        return self.held_elsewhere

    # ------------------------------------------------------------------ forward pass

    def begin_forward(self, start: float, step: int, *, observes: bool) -> None:
        """Begin a forward pass of ``step``; ``observes`` unless gates never close."""
        self.forward = ForwardPass(start)
        if observes:
            self._apart = step % _TOLD_APART_EVERY == 0
            if self._observing or not self._position:  # a pass that touched nothing does not count
                self._observing = True
                self._observe()

    def _observe(self) -> None:
        # Parameters known to be unseen are left out, as compiled code specialises on the class of what it reads.
        known = self.unseen | self._position.keys()
        self._watch(p for p in self._parameters if id(p) not in known and not is_armed(p))  # updates may be pending

    def _watch(self, parameters: Iterable[nn.Parameter]) -> None:
        watched = list(parameters)
        self._watched.update((id(p), p) for p in watched)
        arm(watched, self)

    def opened(self, parameters: list[nn.Parameter], touched: nn.Parameter | None) -> None:
        """Record that a touch of one of ``parameters`` has opened a bucket's gate."""
        if self.forward.under_way and self._apart:
            self._watch(p for p in parameters if p is not touched)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        self._watched.pop(id(parameter), None)
        if gate_of(parameter) is self:
            disarm((parameter,))
        if self._observing:
            if torch.compiler.is_compiling():
                self._compiled.add(id(parameter))
            self._position.setdefault(id(parameter), len(self._position))

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: stop recording, until :meth:`resume`."""
        self._let_go()

    def resume(self, read: Iterable[int]) -> None:
        """Observe the order of use again; parameters with the ids ``read`` were used in between."""
        if self._observing:
            for key in read:
                if key in self._registration and key not in self.unseen:
                    self._position.setdefault(key, len(self._position))
            self._observe()

    def _let_go(self) -> dict[int, nn.Parameter]:
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)
        return watched

    def end_observing(self) -> None:
        """Stop recording at the end of a forward pass, before the updates that it did not touch are applied."""
        left = self._let_go()
        if self._observing:
            self._observing = False
            self._untouched, left = list(left.values()), {}
        self._late = left

    def end_forward(self, untouched: Iterable[nn.Parameter]) -> None:
        """End a forward pass, which did not touch these parameters whose updates were pending."""
        self._late.update((id(p), p) for p in untouched)
        self.forward.under_way = False

    def waits_early(self) -> bool:
        """Record a wait; returns whether it is the first one since the last forward pass, outside of one."""
        forward = self.forward
        early = not forward.under_way and not forward.read_early
        forward.read_early = forward.read_early or early
        return early

    # ------------------------------------------------------------------ backward pass

    def before_backward(self) -> None:
        """Record which parameters get a gradient in this process; DDP also fills in those of other ranks."""
        self._forget_hooks()
        for key, parameter in self._late.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._noting(key)))

    def _noting(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._with_gradient.add(key)

    def after_backward(self, step: int) -> None:
        """Find parameters that were read unseen; their updates are taken within the step from here on.

        Ranks may differ in this, as it changes no message. Call it after all passes of a step, as each may have
        gradients of other layers.
        """
        self.unseen |= {id(p) for p in self._untouched if p.grad is not None} | self._compiled
        self._untouched, self._compiled = [], set()
        late = [parameter for key, parameter in self._late.items() if key in self._with_gradient]
        self._forget()
        if late:
            self.unseen.update(map(id, late))
            self.seen.read_unseen(late, step)

    def _forget(self) -> None:
        self._let_go()
        self._late = {}
        self._forget_hooks()

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._with_gradient = set()

    def close(self) -> None:
        """Remove all hooks and gates."""
        self.end_observing()
        self._forget()
