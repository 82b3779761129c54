r"""How fast a step can be at all: bounds that no order and no partition of the same bytes can beat.

Notation. Layers 1 to L in the order of the forward pass; ``f_j`` and ``b_j`` their forward and backward times,
``F`` and ``B`` the sums; ``c_j`` how long layer j's gradients occupy the link, ``C_k = c_1 + ... + c_k``,
``C = C_L``. A step is counted from the start of a backward pass to the start of the next. Layer j's gradient
is complete at ``r_j = b_j + ... + b_L``; after its weights have arrived, ``q_j = f_j + ... + f_L`` of forward
pass is still to be done. Both shrink as j grows. All of a step's communication ends within the step, because
each layer's forward pass needs that layer's.

**Exact synchronous training with overlap** (`lower_bound`). Take any k. The gradients of layers 1 to k are not
complete before ``r_k``; from there on they occupy the link for ``C_k``; whichever of these layers comes last,
at least ``q_k`` of forward pass comes after it. Hence

    T >= max over k of (r_k + C_k + q_k).

``k = 1`` is ``B + c_1 + F`` and ``k = L`` is ``b_L + C + f_L``, the two terms that are usually named; a large
layer in the middle makes another k the largest. The bound is attained: the step is a single machine (the link)
with jobs of release ``r_j`` and tail ``q_j``, for which sending the first layer that is ready, preemptively, is
optimal (Jackson 1955, Horn 1974), with the value ``max over sets S of (min r + sum c + min q)``; of all
sets with the last layer k, the largest sum is that of layers 1 to k. Partitions of ``p`` instead of preemption
cost at most one partition more: the one on the link when something more urgent becomes ready.

**With a barrier** (`ddp_bound`), as DDP, where the forward pass starts when all gradients have arrived:
``T >= F + max over k of (r_k + C_k)``, by the same argument with ``q = F`` for all layers; attained by sending
gradients as they come. ``k = 1`` and ``k = L`` give ``F + max(B + c_1, b_L + C)``.

**With norm clipping** (`clipped_bound`). Gradients are reduce-scattered (``c_j/2``), the global norm is made of
the parts, updates happen after that, and an all-gather (``c_j/2``) brings each layer's result to everybody.
Take any ``i <= k``. Of layers 1 to k all reduce-scatters, and of layers 1 to i all all-gathers, come before the
forward pass of layer i: the reduce-scatters because no update precedes the norm, and the norm follows all of
them. None of these starts before ``r_k`` (an all-gather follows the reduce-scatter of its own layer), and at
least ``q_i`` comes after the last of them: that is an all-gather of layers 1 to i, or a reduce-scatter, which
even all of ``F`` follows. Hence

    T >= max over i <= k of (r_k + C_k/2 + C_i/2 + q_i).

``i = k = 1``: ``B + c_1 + F``. ``i = 1, k = L``: ``b_L + C/2 + c_1/2 + F``; all reduce-scatters and the first
all-gather end before the first forward pass. ``i = k = L``: ``b_L + C + f_L``. This too is attained, by the
same theorem: reduce-scatters first, and all-gathers by priority whenever none of them is ready, *also before
the norm is known*; the clipping factor is applied where the gradient arrives. As ``C_i <= C_k`` and
``q_i <= F``, it is never above the bound of DDP.

**Costs of messages.** With partitions of at most ``p`` bytes, layers 1 to k need at least ``ceil(bytes/p)``
messages (at least one without partitions, as a message can hold several layers), and each adds the link's
overhead to ``C_k``, or to both halves of it. After its last byte has left, a message takes the link's latency
to arrive; of several in flight only the last one's shows, so each bound grows by one latency: half of it for
the reduce-scatters and half for the all-gathers where these follow each other. (In between, the link is free
for others: a collective taken apart hides its latency better, so `clipped_bound` can be below `lower_bound` by
half of a latency.) The norm costs one collective
of next to no bytes. With servers the pushes alone are counted, so that bound is not attained: the last
partition is still to be pulled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import ModelProfile

__all__ = ["clipped_bound", "ddp_bound", "lower_bound", "norm_seconds", "require_all_reduce"]


def lower_bound(profile: ModelProfile, link: LinkModel, *, partition_bytes: int | None = None) -> float:
    """Seconds that a step of exact synchronous training takes at least, with any overlap.

    Args:
        profile: The model.
        link: The network.
        partition_bytes: Largest message; ``None`` for no limit.

    Raises:
        OptionError: If ``partition_bytes`` is not a positive whole number.
    """
    _require_partition(partition_bytes)
    latency = link.latency_seconds
    communicated = (p.release + p.seconds(link, partition_bytes) + latency + p.tail for p in _prefixes(profile))
    return max(profile.compute_seconds, max(communicated, default=0.0))


def ddp_bound(profile: ModelProfile, link: LinkModel, *, partition_bytes: int | None = None) -> float:
    """Seconds that a step takes at least if it waits for all gradients, as DDP does.

    Args:
        profile: The model.
        link: The network.
        partition_bytes: Largest message; ``None`` for no limit.

    Raises:
        OptionError: If ``partition_bytes`` is not a positive whole number.
    """
    _require_partition(partition_bytes)
    arrived = (p.release + p.seconds(link, partition_bytes) + link.latency_seconds for p in _prefixes(profile))
    return max(profile.backward_seconds, max(arrived, default=0.0)) + profile.forward_seconds


def clipped_bound(profile: ModelProfile, link: LinkModel, *, partition_bytes: int | None = None) -> float:
    """Seconds that a step with norm clipping takes at least, with any overlap.

    Args:
        profile: The model.
        link: The network; with an all-reduce.
        partition_bytes: Largest message; ``None`` for no limit.

    Raises:
        OptionError: If ``partition_bytes`` is not a positive whole number.
        UnsupportedError: If the link pushes and pulls.
    """
    require_all_reduce(link)
    _require_partition(partition_bytes)
    half, forward = link.latency_seconds / 2, profile.forward_seconds
    prefixes = list(_prefixes(profile))
    if not prefixes:
        return profile.compute_seconds
    scattered = max(p.release + p.seconds(link, partition_bytes, share=0.5) for p in prefixes)
    known = scattered + half + norm_seconds(link)
    # Before backward has ended, if the first layers have no parameters.
    best = max(profile.backward_seconds, known) + forward
    busy = 0.0  # the largest r_k + C_k/2 of the layers from here on
    for p in reversed(prefixes):
        mine = p.seconds(link, partition_bytes, share=0.5)
        busy = max(busy, p.release + mine)
        best = max(best, busy + mine + half + p.tail)
    return best


def norm_seconds(link: LinkModel) -> float:
    """Seconds of summing the workers' parts of the squared norm: an all-reduce of next to no bytes."""
    return link.overhead_seconds + link.latency_seconds


def require_all_reduce(link: LinkModel) -> None:
    """Refuse a link that pushes and pulls, for what takes an all-reduce apart.

    Raises:
        UnsupportedError: If it does.
    """
    if link.architecture == "ps":
        raise UnsupportedError("Norm clipping is not modelled for architecture='ps': use 'allreduce'.")


def _require_partition(partition_bytes: int | None) -> None:
    if partition_bytes is not None:
        require_whole("partition_bytes", partition_bytes, 1)


class _Prefix(NamedTuple):
    """Layers 1 to k: when the first of their gradients is complete, their bytes, and the forward pass from k on."""

    release: float
    bytes: int
    tail: float

    def seconds(self, link: LinkModel, partition_bytes: int | None, share: float = 1.0) -> float:
        """How long these layers occupy the link, with ``share`` of a collective's bytes."""
        messages = 1 if partition_bytes is None else -(-self.bytes // partition_bytes)
        return messages * link.overhead_seconds + share * self.bytes * link.seconds_per_byte


def _prefixes(profile: ModelProfile) -> Iterator[_Prefix]:
    """Yield the prefixes that end in a layer with parameters."""
    release, tail, size = profile.backward_seconds, profile.forward_seconds, 0
    for layer in profile.layers:
        size += layer.parameter_bytes
        if layer.parameter_bytes:
            yield _Prefix(release, size, tail)
        release -= layer.backward_seconds
        tail -= layer.forward_seconds
