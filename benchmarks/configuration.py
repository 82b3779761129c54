"""One cell of the comparison: a model, a number of workers and their links."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.contenders import DDP_BUCKETS
from benchmarks.delayed_link import PAYLOAD_SHARE
from benchmarks.emulation import scaled
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.prediction import chosen_schedule
from lightning_bytescheduler.predicting.profiles import ModelProfile, network_profile
from lightning_bytescheduler.predicting.simulator import Schedule, lower_bound, prefixes, simulate

__all__ = ["Configuration", "ddp_bound"]

_PAYLOAD_SHARE = 1448 / 1514  # of an Ethernet frame: what a token bucket lets through, and what is TCP's payload


def ddp_bound(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds that a step takes at least if it waits for all gradients, as DDP does.

    ``T >= F + max over k of (r_k + C_k)``, in the notation of ``simulator``: the forward pass starts when all gradients
    have arrived. Attained by sending gradients as they come.
    """
    arrived = max([profile.backward_seconds, *(arrived for arrived, _ in prefixes(profile, link))])
    return arrived + profile.forward_seconds


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is emulated."""

    network: str  # name of a profile, see ``profiles.NETWORKS``
    ratio: float  # communication time over compute time
    workers: int = 4
    mbit: float = 500.0  # of each worker's link
    megabytes: float = 30.0  # of all gradients
    round_trip_seconds: float = 0.0  # between two workers; 0: that of the machine itself
    runs_ahead: bool = True  # whether the accelerator is given work while it computes
    raw_kernels: bool = False  # whether only a custom autograd function gets the weights
    statistics: int = 0  # batch normalizations of each layer, with three buffers each

    @property
    def name(self) -> str:
        """For tables."""
        round_trip = f", {self.round_trip_seconds * 1e3:g} ms round trip" if self.round_trip_seconds else ""
        kind = ("" if self.runs_ahead else ", not ahead") + (", raw kernels" if self.raw_kernels else "")
        kind += f", {self.statistics} normalizations a layer" if self.statistics else ""
        return f"{self.network}, ratio {self.ratio:g}, {self.workers} workers{round_trip}{kind}"

    @property
    def link(self) -> LinkModel:
        """The link as the bound sees it: all of its payload, and half of a round trip for each hop."""
        share = PAYLOAD_SHARE if self.round_trip_seconds else _PAYLOAD_SHARE
        return LinkModel(
            workers=self.workers,
            bandwidth=self.mbit * 1e6 / 8 * share,
            latency=self.round_trip_seconds / 2,
        )

    @property
    def communication_seconds(self) -> float:
        """Of an all-reduce of all gradients at the link's limit."""
        return self.link.seconds_per_byte * self.megabytes * 1e6

    @property
    def profile(self) -> ModelProfile:
        """What the emulated layers are asked to take."""
        return scaled(
            network_profile(self.network),
            parameter_bytes=round(self.megabytes * 1e6),
            compute_seconds=self.communication_seconds / self.ratio,
        )

    def bounds(self, compute_seconds: float) -> dict[str, float]:
        """Shortest possible steps, in seconds, for layers that take ``compute_seconds`` in all as measured."""
        profile, link = self.profile.scaled_to(compute_seconds), self.link
        return {
            "any order": lower_bound(profile, link),
            "barrier": ddp_bound(profile, link),
        }

    def predictions(self, compute_seconds: float) -> dict[str, float]:
        """What the simulator expects of contenders, in seconds a step; nothing is fitted to measured steps."""
        profile, link = self.profile.scaled_to(compute_seconds), self.link
        schedules = {
            "ddp": Schedule.ddp(),
            **{f"ddp, {size} MB buckets": Schedule.ddp(bucket_bytes=size * 1024 * 1024) for size in DDP_BUCKETS},
            "bytescheduler, overlapped": chosen_schedule(profile, link),
            "bytescheduler, norm clipping": chosen_schedule(profile, link, in_shards=True),
        }
        return {name: simulate(profile, link, schedule) for name, schedule in schedules.items()}
