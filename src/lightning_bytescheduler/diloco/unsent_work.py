"""What a worker has done and its coordinator has not taken yet: counts for each fragment, and for the round."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_bytescheduler.diloco.coordinator_transport import CoordinatedExchange
from lightning_bytescheduler.diloco.messages import SendingPseudoGradient
from lightning_bytescheduler.diloco.transport import Contribution

__all__ = ["Sent", "UnsentWork"]


@dataclass(slots=True, kw_only=True)
class Sent:
    """A pseudo-gradient that is on its way.

    Attributes:
        round: In which it was made.
        fragment: Which.
        exchange: Carries it.
        steps: Taken in the round.
        round_samples: Processed in the round.
        round_tokens: Processed in the round.
        samples: Processed since the fragment was last sent.
        tokens: The same in tokens.
        longest: Steps beside it after which the worker waits.
        steps_since: Steps taken beside it.
    """

    round: int
    fragment: int
    exchange: CoordinatedExchange
    steps: int
    round_samples: int
    round_tokens: int
    samples: int
    tokens: int
    longest: int
    steps_since: int = 0


class UnsentWork:
    """Counts of one worker. For the training thread.

    A round without a quorum changes no weights. What was done in it is *carried*: it stays in the local weights and in
    these counts, and the next update of the fragment has all of it.

    Args:
        fragments: How many.

    Attributes:
        samples: By fragment: since it was last part of a mean.
        tokens: The same in tokens.
        steps: That were carried from rounds without a quorum.
        round_samples: Of these steps.
    """

    def __init__(self, fragments: int) -> None:
        self.samples = [0] * fragments
        self.tokens = [0] * fragments
        self.steps = 0
        self.round_samples = 0

    def count(self, *, samples: int, tokens: int) -> None:
        """Take note of a step."""
        for fragment in range(len(self.samples)):
            self.samples[fragment] += samples
            self.tokens[fragment] += tokens

    def contribution(
        self, said: SendingPseudoGradient, fragment: int, pseudo_gradient: Tensor, weight: int
    ) -> Contribution:
        """What the coordinator gets of a fragment.

        Args:
            said: Of the round that it ends.
            fragment: Which.
            pseudo_gradient: Of all that was trained since the fragment was last part of a mean.
            weight: In the mean, as this worker works it out.
        """
        return Contribution(
            worker=said.worker,
            round=said.round,
            fragment=fragment,
            pseudo_gradient=pseudo_gradient,
            weight=weight,
            samples=self.samples[fragment],
            tokens=self.tokens[fragment],
            steps=said.steps + self.steps,
            round_samples=said.samples + self.round_samples,
        )

    def sent(self, said: SendingPseudoGradient, fragment: int, exchange: CoordinatedExchange, *, longest: int) -> Sent:
        """What is on its way now.

        Args:
            said: Of the round that it ends.
            fragment: Which.
            exchange: Carries it.
            longest: Steps beside it after which the worker waits.
        """
        return Sent(
            round=said.round,
            fragment=fragment,
            exchange=exchange,
            steps=said.steps,
            round_samples=said.samples,
            round_tokens=said.tokens,
            samples=self.samples[fragment],
            tokens=self.tokens[fragment],
            longest=longest,
        )

    def taken(self, sent: Sent) -> None:
        """An update has become part of a mean, or is late; steps beside which it travelled are still to be sent."""
        self.samples[sent.fragment] -= sent.samples
        self.tokens[sent.fragment] -= sent.tokens
        self.steps = self.round_samples = 0

    def carry(self, *, steps: int, samples: int) -> None:
        """A round is over that has changed nothing.

        Args:
            steps: Taken in it.
            samples: Processed in it.
        """
        self.steps += steps
        self.round_samples += samples

    def withdraw(self, sent: Sent) -> None:
        """An update is not to be part of its round: what it has is carried."""
        sent.exchange.cancel()
        self.carry(steps=sent.steps, samples=sent.round_samples)

    def overwritten(self, fragment: int) -> None:
        """The trained weights of a fragment are the global ones now: nothing of it is left to send."""
        self.samples[fragment] = self.tokens[fragment] = 0
        self.steps = self.round_samples = 0

    def start_anew(self) -> None:
        """All weights are the global ones now."""
        for fragment in range(len(self.samples)):
            self.overwritten(fragment)
