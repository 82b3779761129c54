"""Where the global weights stand, and who can get there by which means: versions and chains of the last rounds."""

from __future__ import annotations

from lightning_bytescheduler.diloco.coordinator_protocol import chain_after

__all__ = ["START", "Lineage"]

START = "0" * 32
"""The chain at the beginning of a run."""


class Lineage:
    """The version and the chain of the global weights, now and some rounds back.

    Args:
        version: Of the weights.
        chain: Of the weights.
    """

    def __init__(self, version: int = 0, chain: str = START) -> None:
        self.version = version
        self.chain = chain
        self._chains = {version: chain}

    def merged(self, *, round: int, fragment: int, digest: str, total: int, oldest_mean: int) -> None:
        """A round has become part of the weights.

        Args:
            round: The next after the version.
            fragment: That was merged.
            digest: Of its mean; empty if nothing was merged.
            total: The sum of the weights.
            oldest_mean: The earliest round whose mean is still kept.
        """
        if round != self.version + 1:
            raise ValueError(f"Round {round} cannot follow version {self.version} of the weights.")
        self.chain = chain_after(self.chain, round=round, fragment=fragment, digest=digest, total=total)
        self.version = round
        self._chains[round] = self.chain
        self._chains = {version: chain for version, chain in self._chains.items() if version >= oldest_mean - 1}

    def leads_on_from(self, version: int, chain: str) -> bool:
        """Whether weights of that version and chain can follow by the means that are kept."""
        return self._chains.get(version) == chain

    def chain_of(self, version: int) -> str:
        """The chain of a version that is not too old; empty for others."""
        return self._chains.get(version, "")
