"""The body of ``lightning-bytescheduler predict``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_bytescheduler.checks import ARCHITECTURES, closest
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.policies import policy_of
from lightning_bytescheduler.simulation.compressed_steps import CODECS, break_even_bandwidth
from lightning_bytescheduler.simulation.link import ALGORITHMS, IDLE_WITH_SPARE_SERVERS, LinkModel, network_in_words
from lightning_bytescheduler.simulation.picture import draw_prediction
from lightning_bytescheduler.simulation.prediction import RIVALS, Prediction, predict, slices
from lightning_bytescheduler.simulation.profiles import NETWORKS, ModelProfile, network_profile, profile_of_size
from lightning_bytescheduler.simulation.quantities import (
    RATES,
    TIMES,
    parameters_in,
    rate_in_words,
    require_duration,
    require_rate,
)
from lightning_bytescheduler.simulation.simulator import Schedule

__all__ = ["add_link_arguments", "add_profile_arguments", "answer", "link_of", "predicted_table", "profile_of"]

_GPT = ("gpt", "gpt2", "gpt2small")  # which `transformer` is
_OLD_ALGORITHM = "push_pull"  # an architecture, which LinkModel says
_LITTLE = 0.03  # of a step; less than a model of a network can tell


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what describes a model, and what is compared with it."""
    parser.add_argument(
        "--profile",
        "--network",
        metavar="PROFILE",
        help=f"the model: {', '.join(NETWORKS)}; a size, such as 350M (parameters) or 100MB (fp32 gradients), for 20 "
        "equal layers; or a JSON file, as --json writes it",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"compare with this scheduling policy, of {', '.join(RIVALS)}; may be given several times "
        "(default: all of these)",
    )
    parser.add_argument(
        "--compute",
        metavar="TIME",
        help="how long one worker alone takes for a step, such as 350ms (default: what the profile says; 200ms for "
        "networks and sizes)",
    )
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw the speed-up around this bandwidth, for N, 4N and 16N workers, to this file: a .png, .svg or .pdf "
        "(needs the extra 'plots')",
    )


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what describes a network, for :func:`link_of`."""
    parser.add_argument("--workers", type=int, metavar="N", help="how many workers train together")
    parser.add_argument(
        "--bandwidth",
        "--link",
        metavar="RATE",
        help=f"of each worker's link, each way, such as {RATES}",
    )
    parser.add_argument(
        "--latency",
        metavar="TIME",
        help=f"of one hop, half of the round trip that ping shows, such as {TIMES} (default: 0s)",
    )
    parser.add_argument(
        "--overhead",
        metavar="TIME",
        help="what each message costs however many are in flight, such as 50us (default: 0s)",
    )
    parser.add_argument(
        "--architecture",
        default="allreduce",
        metavar="NAME",
        help=f"who reduces gradients: {' or '.join(ARCHITECTURES)}, parameter servers (default: allreduce)",
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="K",
        help="spare machines that are servers, for --architecture ps (default: 0, one beside each worker)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        metavar="SHARE",
        help="of the time, how long links wait for each other with --architecture ps; 0 for the formula's (default: as "
        f"measured, {IDLE_WITH_SPARE_SERVERS} with spare servers, 0 without)",
    )
    parser.add_argument(
        "--algorithm",
        choices=(*ALGORITHMS, _OLD_ALGORITHM),
        default="ring",
        help=f"how workers reduce gradients among themselves: {', '.join(ALGORITHMS)} (default: ring)",
        metavar="NAME",
    )
    parser.add_argument(
        "--messages", type=int, metavar="M", help="how many messages the backend carries at once (default: any number)"
    )


def link_of(options: argparse.Namespace) -> LinkModel:
    """The network that parsed arguments describe.

    Raises:
        OptionError: If it cannot be; names the option.
    """
    rates = {"bandwidth": require_rate("--bandwidth", options.bandwidth)}
    times = {name: require_duration(f"--{name}", getattr(options, name) or 0.0) for name in ("latency", "overhead")}
    try:
        return LinkModel(
            workers=options.workers,
            architecture=options.architecture,
            servers=options.servers,
            algorithm=options.algorithm,
            messages_in_flight=options.messages,
            idle_share=options.idle,
            **rates,
            **times,
        )
    except OptionError as error:
        name = {"messages_in_flight": "messages", "idle_share": "idle"}.get(error.option, error.option)
        raise OptionError(f"--{name.replace('_', '-')}", error.value, error.allowed, error.hint) from None


def profile_of(text: str) -> ModelProfile:
    """The model that ``--profile`` names: a network, a size, or a file.

    Raises:
        OptionError: If it is none of these, or the file holds no profile.
        OSError: If the file cannot be read.
    """
    name = text.lower().replace("-", "").replace("_", "")
    if name in NETWORKS:
        return network_profile(name)
    size = parameters_in(text)
    if size is not None and not Path(text).exists():
        return profile_of_size(text, size)
    if not Path(text).exists():
        near = "transformer" if name in _GPT else closest(name, NETWORKS)
        hint = "" if near is None else f" (did you mean {near}?)"
        raise OptionError(
            "--profile",
            text,
            f"{', '.join(NETWORKS)}, a size such as 350M or 100MB, or a JSON file that is there{hint}",
        )
    if Path(text).is_dir():
        raise OptionError("--profile", text, "a JSON file, not a folder")
    return ModelProfile.load(text)


def predicted_table(options: argparse.Namespace) -> tuple[str, str, list[tuple[str, str]]]:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Returns:
        The answer in a sentence or two, a title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If an argument is not allowed.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    for name in ("profile", "workers", "bandwidth"):
        if getattr(options, name) is None:
            raise OptionError(f"--{name}", None, "given, where no module is measured")
    link = link_of(options)
    compute = None if options.compute is None else require_duration("--compute", options.compute)
    if compute == 0:
        raise OptionError("--compute", options.compute, f"a time above 0, such as {TIMES}")
    profile = profile_of(options.profile)
    if compute is not None:
        profile = profile.scaled_to(compute)
    lines = predict(profile, link, policies=options.policy or RIVALS)
    if options.png is not None:
        draw_prediction(profile, link, options.png)
    title = f"{profile.name}, {network_in_words(link)}: a step, and its speed-up over ddp's best"
    said = [answer(profile, link, lines)]
    if link.servers > link.workers:
        said.append(f"{link.servers} servers count as {link.workers}: more than one for each worker change nothing.")
    played = {line.name for line in lines}
    for policy in map(policy_of, options.policy or RIVALS):
        if policy.name not in played:
            said.append(f"{policy.name} is not played: it would cut the model into {slices(profile, policy):,} slices.")
    return "\n".join(said), title, _rows(profile, link, lines)


def answer(profile: ModelProfile, link: LinkModel, lines: Sequence[Prediction]) -> str:
    """What the figures mean, in a sentence or two.

    Args:
        profile: The model.
        link: The network.
        lines: What :func:`predict` says of both.
    """
    if link.workers == 1:
        return "One worker has nobody to talk to: every strategy takes as long as it computes."
    by_name = {line.name: line.step_seconds for line in lines}
    ddp, scheduled = by_name["ddp, best buckets"], by_name["bytescheduler, best sizes"]
    fastest = min(ddp, scheduled)
    speed = link.workers * profile.compute_seconds / fastest
    if speed < 1:
        return (
            f"Train on one machine: over this network {link.workers:,} workers are slower than one alone "
            f"({speed:.2f}x). What helps is a faster link, or to send less: larger batches, diloco."
        )
    gain = ddp / scheduled
    if gain < 1 + _LITTLE:
        name, why = "ddp", "bytescheduler gains nothing that shows"
    else:
        name, why = "bytescheduler", f"a step is {gain:.2f}x as fast as ddp's with its best buckets"
    return f"Use {name}: {link.workers:,} workers train {speed:.2f}x as fast as one, and {why}."


def _rows(profile: ModelProfile, link: LinkModel, lines: tuple[Prediction, ...]) -> list[tuple[str, str]]:
    by_name = {line.name: line for line in lines}
    ddp, best = by_name["ddp, best buckets"], by_name["bytescheduler, best sizes"]
    occupied = profile.parameter_bytes * link.seconds_per_byte
    rows = [
        ("gradients", f"{profile.parameter_bytes / 1e6:,.1f} MB"),
        ("communication", f"{occupied / profile.compute_seconds:.2f} of computation"),
    ]
    for line in lines:
        speedup = f"{ddp.step_seconds / line.step_seconds:.2f}x"
        share = "" if line.compressed_share is None else f"  {line.compressed_share:.0%} of the bytes compressed"
        rows.append((line.name, f"{line.step_seconds * 1e3:,.1f} ms  {speedup:>7}{share}"))
    if any(line.compressed_share is not None for line in lines):
        rows += [(f"{codec.name} pays below", rate_in_words(break_even_bandwidth(link, codec))) for codec in CODECS]
    rows.append(("ddp's best buckets", _megabytes(ddp.schedule)))
    if best.schedule is not None and best.schedule.partition_bytes and best.schedule.credit_bytes:
        rows += [
            ("best partition_size", f"{best.schedule.partition_bytes // 4:,} parameters"),
            ("best credit", f"{best.schedule.credit_bytes // 4:,} parameters"),
            ("best bucket_cap_mb", _megabytes(best.schedule)),
        ]
    return rows


def _megabytes(schedule: Schedule | None) -> str:
    if schedule is None or schedule.bucket_bytes is None:
        return "one for each layer"
    default = " (default)" if schedule.first_bucket_bytes is not None else ""
    return f"{schedule.bucket_bytes / 2**20:.3g} MiB{default}"
