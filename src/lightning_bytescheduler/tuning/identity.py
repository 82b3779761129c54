"""What a search's results hold for: a state of another model, or of another link, says nothing about this one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.checks import require_whole
from lightning_bytescheduler.tuning.link import LinkEstimate

__all__ = ["TuningIdentity"]

_SAME_LINK = 2.0  # probes of one link differ; beyond this factor it is another


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningIdentity:
    """Model, workers and link.

    Attributes:
        parameters: How many are trained.
        bytes_per_parameter: Size of one gradient element.
        workers: How many train together.
        backend: What reduces gradients, such as ``"gloo"``.
        link: As measured, or ``None`` if it was not.
        in_shards: Whether gradients are reduced in shards, for which other sizes are good.

    Raises:
        OptionError: Names the attribute that is not allowed.
    """

    parameters: int
    bytes_per_parameter: int
    workers: int
    backend: str
    link: LinkEstimate | None = None
    in_shards: bool = False

    def __post_init__(self) -> None:
        for option in ("parameters", "bytes_per_parameter", "workers"):
            require_whole(option, getattr(self, option), 1)
        if not isinstance(self.backend, str):
            raise OptionError("backend", self.backend, "a text")

    def matches(self, other: TuningIdentity) -> bool:
        """Whether results for one hold for the other. A link that was not measured matches any."""
        for field in fields(self):
            if field.name != "link" and getattr(self, field.name) != getattr(other, field.name):
                return False
        if self.link is None or other.link is None:
            return True
        # Start-up costs are tiny and noisy, so what the model's messages take is compared.
        size = self.parameters * self.bytes_per_parameter / 64
        ratio = self.link.seconds(size) / other.link.seconds(size)
        return 1 / _SAME_LINK <= ratio <= _SAME_LINK

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TuningIdentity:
        """Make it from ``state_dict()``."""
        link = state["link"]
        return cls(**{**state, "link": None if link is None else LinkEstimate(**link)})
