"""What a worker has done and its coordinator has not taken yet: counts for each fragment, and for the round."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.diloco.coordinator_transport import CoordinatedExchange

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
