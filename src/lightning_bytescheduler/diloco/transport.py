"""What carries a worker's messages and pseudo-gradients: between ranks launched together, or through a coordinator.

Both end a round with the same: a weighted mean that every worker has the same bits of, with which each takes the outer
step itself. Where ranks are launched together, all of them live or the job ends, and an exchange always gives a mean.
Through a coordinator a worker may be late, or cut off: then the exchange says that there is none to be had in this way,
and the worker has to catch up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_bytescheduler.diloco.mailbox import Postman
from lightning_bytescheduler.diloco.messages import Message, PseudoGradientArrived
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import Exchange, PseudoGradientExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a worker has made of a fragment in a round.

    Attributes:
        worker: Who.
        round: In which round; 0 where fragments are synchronised that do not belong to the round that ends.
        fragment: Which fragment.
        pseudo_gradient: Flat, fp32, on the CPU; not to be changed any more.
        weight: In the mean, as this worker works it out.
        samples: Processed since this fragment was last sent.
        tokens: The same in tokens; 0 where nobody counts them.
        steps: Taken in this round.
        round_samples: Processed in this round.
    """

    worker: str
    round: int
    fragment: int
    pseudo_gradient: Tensor
    weight: int = 0
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    round_samples: int = 0


@dataclass(frozen=True, slots=True)
class CatchUp:
    """There is no mean for the worker now: it has to look where the others are.

    Attributes:
        reason: In words.
    """

    reason: str


class Exchanging(Protocol):
    """A pseudo-gradient that is on its way."""

    def is_there(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once. Looks only."""

    def wait(self, timeout: float) -> tuple[Tensor, int] | CatchUp:
        """Wait for the end of the round.

        Args:
            timeout: Longest wait in seconds.

        Returns:
            The weighted mean, flat, and the sum of the weights; or that this worker has to catch up.

        Raises:
            SchedulerTimeoutError: If it is not there in time.
            BaseException: What the exchange has failed with.
        """


class Transport(Protocol):
    """A worker's way to the others. Nothing but :meth:`Exchanging.wait` waits for them."""

    def post(self, message: Message) -> None:
        """Send a message to the batch scheduler; at once, never blocks."""

    def start(self, contribution: Contribution) -> Exchanging:
        """Begin to exchange a fragment; returns at once."""

    def abort(self, cause: BaseException) -> None:
        """Fail everything that is under way, and whatever is started later. For any thread."""

    def stop(self, timeout: float) -> bool:
        """End all threads; returns whether nothing was under way and they ended within ``timeout`` seconds each."""


class CollectiveTransport:
    """A ``Transport`` between ranks that were launched together.

    Args:
        postman: Carries messages.
        mailbox: The batch scheduler's.
        exchange: Carries pseudo-gradients; every worker starts the same ones in the same order.
    """

    def __init__(self, postman: Postman, mailbox: str, exchange: PseudoGradientExchange) -> None:
        self._postman = postman
        self._mailbox = mailbox
        self._exchange = exchange

    def post(self, message: Message) -> None:
        """See :class:`Transport`."""
        self._postman.post(self._mailbox, message)

    def start(self, contribution: Contribution) -> Exchange:
        """See :class:`Transport`; tells the batch scheduler when the mean is there."""
        return self._exchange.start(
            f"fragment {contribution.fragment}",
            contribution.pseudo_gradient,
            weight=contribution.weight,
            on_end=self._arrived(contribution),
        )

    def abort(self, cause: BaseException) -> None:
        """See :class:`Transport`."""
        self._exchange.abort(cause)

    def stop(self, timeout: float) -> bool:
        """See :class:`Transport`."""
        self._postman.stop(timeout)
        return self._exchange.stop(timeout)

    def _arrived(self, contribution: Contribution) -> Callable[[BaseException | None], None]:
        def arrived(error: BaseException | None) -> None:
            if error is None and contribution.round:
                self.post(PseudoGradientArrived(worker=contribution.worker, round=contribution.round))

        return arrived
