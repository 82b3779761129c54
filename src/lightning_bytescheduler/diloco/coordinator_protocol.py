"""What workers and the coordinator tell each other, on one port: paths, headers and messages.

Two kinds of traffic share the port. *Control* is a WebSocket per worker at ``WORKER_PATH``. The worker's first frame is
a :class:`Hello`, and the coordinator answers with a :class:`Welcome` or a :class:`Refusal`. Each later frame is a
:class:`Batch` of the messages of ``diloco/messages.py`` and of this file. *Bulk* is HTTP, each request by itself:
updates up, means down, and the global state for workers that need it. Every request carries ``Authorization: Bearer
TOKEN`` where the coordinator has a token. All but the WebSocket and the pages for people carry the worker's session.

A worker's place. The global weights have a *version*: the number of rounds that are part of them. All workers with the
same version of the same run have the same bits, as each takes the same outer step with the same decoded mean. The
*chain* distinguishes runs with the same number of rounds: it is a digest of the former chain and of the mean's digest.
It reveals a worker that has merged a round which a restarted coordinator does not know; that worker fetches the state.

A connection. After each ``Welcome`` the worker brings its weights to ``Welcome.version``. Then it sends ``JoinRounds``,
whose ``session`` the coordinator fills in itself. The coordinator answers each frame of a worker with one that has
``heard`` it. The worker sends no second frame before that, and collects its messages for the next ``Batch``. The
coordinator ends a connection with a reason (a frame that is wrong, a worker that
does not read, a coordinator that stops). The worker comes back with a ``Hello`` with its session, and nothing is lost.
A request refused over HTTP is answered with ``{"error": "..."}``, and has changed nothing; 503 and 429 come with
``Retry-After``.

A round, from a worker's side: ``StartRound`` - steps, each with a ``StepReport`` - ``SendAfter`` -
``SendingPseudoGradient``, and the update as one ``PUT`` - ``RoundEnded`` - the mean as one ``GET``, the outer step, and
the next ``StartRound``. A worker that misses the end of a round gets ``RoundEnded`` all the same, and catches
up: mean by mean if the coordinator still has them, else with the state. So does one that is ahead of a coordinator,
which was started again from a state before its last rounds: what it has trained since is given up.

Only tokens and sessions are secret: they are never in a URL, and never logged.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeAlias

import msgspec

from lightning_bytescheduler.checks import require_bool, require_one_of, require_positive, require_share, require_whole
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES, WireFormat
from lightning_bytescheduler.diloco.messages import AnyMessage, Message, decoded
from lightning_bytescheduler.diloco.outer_optimizer import SPARSE_DEFAULTS
from lightning_bytescheduler.diloco.round_end import INNER_STEPS, FastestSteps, FixedSteps, RoundTarget, SampleTarget
from lightning_bytescheduler.exceptions import OptionError

PROTOCOL = 1
"""Version of this protocol; a worker with another one is refused."""

WORKER_PATH = "/v1/worker"
"""WebSocket, see above."""
UPDATE_PATH = "/v1/rounds/{round}/fragments/{fragment}"
"""``PUT``: a worker's pseudo-gradient, as ``WireFormat`` encodes it, with ``DIGEST_HEADER``, ``SAMPLES_HEADER``,
``ROUND_SAMPLES_HEADER`` and ``STEPS_HEADER``; the answer is an :class:`UpdateReceipt`. Where the
coordinator hands slices out, the update's samples come first in the body: a list of ``TrainedRun`` as JSON, of
``TRAINED_HEADER`` bytes. A ``PUT`` may be repeated, and overtake the ``SendingPseudoGradient`` of its round. ``GET``:
the mean of a round that has ended, in the same form, with ``TOTAL_HEADER`` (0: nothing was merged, and no body),
``CHAIN_HEADER`` and ``DIGEST_HEADER``; 404 if it is not kept any more."""
STATE_PATH = "/v1/state"
"""``GET``: global weights (``weights.NAME``) and the outer optimizer's state as safetensors, with ``VERSION_HEADER``,
``CHAIN_HEADER``; 404 if there are none, so that this worker is to send its own, and 503 while another one does.
``PUT``: the same of the first weights; it has momentum only if it begins from a checkpoint."""
SLICES_PATH = "/v1/slices"
"""``POST``: one message of ``slices/tracker.py``; the answer is another."""
STATUS_PATH = "/v1/status"
METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
"""Without a token: 200, or 503 while the coordinator stops."""

SESSION_HEADER = "ByteScheduler-Session"
DIGEST_HEADER = "ByteScheduler-Digest"
"""xxh3_128 of the body, in hexadecimal digits."""
SAMPLES_HEADER = "ByteScheduler-Samples"
"""Samples that the worker has processed since it last sent this fragment; the update is weighted with them."""
STEPS_HEADER = "ByteScheduler-Steps"
"""Steps that the worker has taken in this round."""
ROUND_SAMPLES_HEADER = "ByteScheduler-Round-Samples"
"""Samples that the worker has processed in this round; those of ``SAMPLES_HEADER`` if left out."""
TRAINED_HEADER = "ByteScheduler-Trained-Bytes"
TOTAL_HEADER = "ByteScheduler-Total-Weight"
VERSION_HEADER = "ByteScheduler-Weights-Version"
CHAIN_HEADER = "ByteScheduler-Chain"

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@/-]+\Z")]
_Session: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
_Chain: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Parameter: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
_Shape: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
_Option: TypeAlias = Annotated[str, msgspec.Meta(max_length=100)]
_Scalar: TypeAlias = Annotated[str, msgspec.Meta(max_length=200)] | int | float | bool | None
_MOST_PARAMETERS = 2**17


def update_path(round: int, fragment: int) -> str:
    """``UPDATE_PATH`` of one fragment in one round."""
    return UPDATE_PATH.format(round=round, fragment=fragment)


def chain_after(chain: str, *, round: int, fragment: int, digest: str, total: int) -> str:
    """The chain after a round.

    Args:
        chain: The chain before the round; 32 hexadecimal digits, all ``0`` at the beginning of a run.
        round: Its number.
        fragment: The fragment that was merged.
        digest: Digest of the payload that workers get, as in ``DIGEST_HEADER``; empty if nothing was merged.
        total: The sum of the weights of what was merged.
    """
    return hashlib.blake2b(f"{chain} {round} {fragment} {total} {digest}".encode(), digest_size=16).hexdigest()


# ── Joining ───────────────────────────────────────────────────────────


class ModelParameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter that is trained.

    Attributes:
        name: In the module.
        shape: Its sizes.
        dtype: As torch calls it, such as ``float32``.
    """

    name: _Parameter
    shape: _Shape
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coordinator's options, which hold for all workers of a run; named as in ``DiLoCoStrategy``.

    Attributes:
        samples_per_round: See ``DiLoCoStrategy``, also for the others.
        inner_steps: See there.
        equal_steps: See there.
        outer_steps: See there.
        outer_lr: See there.
        outer_momentum: See there.
        fragments: See there.
        overlap_steps: See there.
        wire_dtype: See there; of updates and means.
    """

    samples_per_round: int | None = None
    inner_steps: int | None = None
    equal_steps: bool = False
    outer_steps: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap_steps: int = 0
    wire_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.samples_per_round is None and self.inner_steps is None:
            msgspec.structs.force_setattr(self, "inner_steps", INNER_STEPS)

    @property
    def target(self) -> RoundTarget:
        """What ends a round."""
        if self.inner_steps is None:
            return SampleTarget(int(self.samples_per_round or 0))
        return FixedSteps(self.inner_steps) if self.equal_steps else FastestSteps(self.inner_steps)

    @property
    def target_in_words(self) -> str:
        """What ends a round, for people."""
        if self.inner_steps is None:
            return f"{self.samples_per_round} samples of all workers"
        return f"{self.inner_steps} steps of {'every worker' if self.equal_steps else 'the fastest worker'}"

    @property
    def wire(self) -> WireFormat:
        """How updates and means travel."""
        return wire_named("wire_dtype", self.wire_dtype)


def run_options(**given: Any) -> RunOptions:
    """What all workers have in common, checked.

    Args:
        given: Fields of :class:`RunOptions` by name; None for the default.

    Raises:
        OptionError: Names the option that is not allowed.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    for option in ("samples_per_round", "inner_steps", "outer_steps"):
        if option in chosen:
            require_whole(option, chosen[option], 1)
    require_bool("equal_steps", chosen.get("equal_steps", False))
    if "samples_per_round" in chosen:
        for option in ("inner_steps", "equal_steps"):
            if chosen.get(option):
                raise OptionError(option, chosen[option], "left out where samples_per_round ends a round")
    wire = wire_named("wire_dtype", chosen.get("wire_dtype", "fp32"))
    defaults = SPARSE_DEFAULTS if wire.dtype == "sparse" else {}
    options = RunOptions(**{**defaults, **chosen, "wire_dtype": wire.name})
    require_positive("outer_lr", options.outer_lr)
    require_share("outer_momentum", options.outer_momentum)
    require_whole("fragments", options.fragments, 1)
    steps, between = require_whole("overlap_steps", options.overlap_steps, 0), options.inner_steps
    if between is not None and steps >= between:
        raise OptionError("overlap_steps", steps, f"less than the steps between two sends, inner_steps={between}")
    return options


def wire_named(option: str, name: str) -> WireFormat:
    """The format of a name: one of ``WIRE_DTYPES``, or sparse with its density, as in ``"sparse:0.01"``.

    Raises:
        OptionError: If there is none of that name; names ``option``.
    """
    dtype, colon, density = str(name).partition(":")
    if dtype != "sparse" or not colon:
        return WireFormat(dtype=require_one_of(option, name, WIRE_DTYPES))  # type: ignore[arg-type]  # one of them
    try:
        return WireFormat(dtype="sparse", density=float(density))
    except ValueError as error:  # an OptionError, too
        raise OptionError(option, name, "sparse with a density above 0 and at most 1, as 'sparse:0.01'") from error


class Hello(AnyMessage, frozen=True, kw_only=True):
    """A worker wants to take part, or is back.

    Attributes:
        protocol: ``PROTOCOL``.
        package: Version of this package.
        worker: The name it would like; the coordinator makes it unique. A worker that comes back says its own.
        session: Session of the last :class:`Welcome`; empty for a process that has none.
        model: What it trains, in the order of the model.
        options: Those of ``RunOptions`` that the user gave, by name. They must be the coordinator's.
        ranks: Number of ranks that train together as this worker.
        version: Version of the global weights that it has; 0 for its own first weights.
        chain: Chain of these weights.
    """

    protocol: int
    package: Annotated[str, msgspec.Meta(max_length=60)]
    worker: _Name
    session: _Session = ""
    model: Annotated[tuple[ModelParameter, ...], msgspec.Meta(max_length=_MOST_PARAMETERS)]
    options: Annotated[dict[_Option, _Scalar], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    version: _Count = 0
    chain: _Chain = "0" * 32


class Welcome(AnyMessage, frozen=True, kw_only=True):
    """The worker is admitted to the run.

    Attributes:
        worker: Its name in this run: in reports, slices, logs and pages.
        session: The worker's secret, which goes with every request.
        options: What holds for all workers.
        version: Version of the global weights.
        chain: Chain of these weights.
        fetch: Whether the worker has to take the state before it starts, as it has another version or none.
        lease: Seconds without a sign of life after which it is given up.
        leads: Whether it validates, logs and saves for all.
    """

    worker: _Name
    session: _Session
    options: RunOptions
    version: _Count
    chain: _Chain
    fetch: bool
    lease: float
    leads: bool = False


class Refusal(AnyMessage, frozen=True, kw_only=True):
    """The worker cannot take part, and trying again would not help.

    Attributes:
        reason: What differs, in words for the person who started it.
    """

    reason: str


class UpdateReceipt(AnyMessage, frozen=True, kw_only=True):
    """What became of an update.

    Attributes:
        verdict: ``"added"`` to its round; ``"dropped"``, as it was late, or its weight became 0; ``"again"``: it was
            there before, and this one changed nothing.
        weight: The update's weight in the mean.
    """

    verdict: Annotated[str, msgspec.Meta(pattern="^(added|dropped|again)$")]
    weight: _Count = 0


class Batch(AnyMessage, frozen=True, kw_only=True):
    """One frame of a worker's WebSocket, either way.

    Attributes:
        number: Number of the frame, from 1 on in each connection and direction.
        heard: From the coordinator: the number of the worker's last frame.
        messages: In order.
    """

    number: _Count
    heard: _Count = 0
    messages: tuple[Message, ...] = ()


Frame: TypeAlias = Hello | Welcome | Refusal | Batch

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)
_SHOWN = 200  # letters of a wrong frame, in its error


def encode_frame(frame: Frame | UpdateReceipt) -> str:
    """Write a frame."""
    return _ENCODER.encode(frame).decode()


def decode_frame(text: str | bytes, *, sender: str) -> Frame:
    """Read a frame.

    Args:
        text: The frame.
        sender: Who sent it, for the error.

    Raises:
        OptionError: If it is not a frame; names the sender and the field.
    """
    return decoded(_DECODER, text, sender=sender, of="the coordinator's protocol", shown=_SHOWN)
