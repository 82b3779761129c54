"""The body of ``lightning-bytescheduler predict``: its arguments, and the rows that it prints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from lightning_bytescheduler.simulation.link import ALGORITHMS, LinkModel
from lightning_bytescheduler.simulation.picture import draw_prediction
from lightning_bytescheduler.simulation.prediction import Prediction, predict
from lightning_bytescheduler.simulation.profiles import NETWORKS, ModelProfile, network_profile
from lightning_bytescheduler.simulation.simulator import Schedule

__all__ = ["add_arguments", "add_link_arguments", "bits_per_second", "link_of", "predicted_table", "seconds"]

_QUANTITY = re.compile(r"\s*(?P<number>\d+(\.\d+)?|\.\d+)\s*(?P<unit>[a-z]+)\s*", re.IGNORECASE)
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--profile",
        required=True,
        metavar="PROFILE",
        help=f"{', '.join(NETWORKS)}, or a JSON file with the layers' parameter_bytes, forward_seconds and "
        "backward_seconds in the order of the forward pass",
    )
    add_link_arguments(parser)
    parser.add_argument("--spare-servers", type=int, default=0, metavar="K", help="for push_pull, beside the workers")
    parser.add_argument(
        "--compute", type=seconds, metavar="TIME", help="of a step on one worker, to which the profile is scaled"
    )
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw the speed-up over 1 to 100 Gbit/s to this file, a .png, .svg or .pdf (needs the extra 'plots')",
    )


def add_link_arguments(
    parser: argparse.ArgumentParser, *, algorithms: Sequence[str] = ALGORITHMS, required: bool = True
) -> None:
    """Declare what describes a network, for :func:`link_of`.

    Args:
        parser: Gets the arguments.
        algorithms: That may be chosen.
        required: Whether workers and bandwidth have to be given.
    """
    parser.add_argument("--workers", type=int, required=required, metavar="N", help="how many workers train together")
    parser.add_argument(
        "--bandwidth",
        type=bits_per_second,
        required=required,
        metavar="RATE",
        help="of each link, such as 500mbit, 10gbit",
    )
    parser.add_argument(
        "--latency", type=seconds, default=0.0, metavar="TIME", help="of a hop, such as 20ms, 50us (default: none)"
    )
    parser.add_argument(
        "--overhead",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="what each message costs however many are in flight (default: nothing)",
    )
    parser.add_argument("--algorithm", choices=algorithms, default="ring", help="how gradients are reduced")
    parser.add_argument("--messages", type=int, metavar="M", help="that the backend carries at once (default: any)")


def link_of(options: argparse.Namespace, *, spare_servers: int = 0) -> LinkModel:
    """The network that parsed arguments describe.

    Raises:
        OptionError: If it cannot be.
    """
    return LinkModel(
        workers=options.workers,
        bandwidth=options.bandwidth / 8,
        latency=options.latency,
        overhead=options.overhead,
        algorithm=options.algorithm,
        spare_servers=spare_servers,
        messages_in_flight=options.messages,
    )


def predicted_table(options: argparse.Namespace) -> tuple[str, list[tuple[str, str]]]:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If an argument is not allowed.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    profile = network_profile(options.profile) if options.profile in NETWORKS else ModelProfile.load(options.profile)
    if options.compute is not None:
        profile = profile.scaled_to(options.compute)
    link = link_of(options, spare_servers=options.spare_servers)
    lines = predict(profile, link)
    if options.png is not None:
        draw_prediction(profile, link, options.png)
    return f"{profile.name}: a step, and its speed-up over ddp's best", _rows(profile, link, lines)


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
        rows.append((line.name, f"{line.step_seconds * 1e3:,.1f} ms  {speedup:>7}"))
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


def bits_per_second(text: str) -> float:
    """Parse a rate such as ``500mbit``.

    Raises:
        ArgumentTypeError: If it is none.
    """
    return _quantity(text, _RATES, "a rate such as 500mbit or 10gbit")


def seconds(text: str) -> float:
    """Parse a time such as ``20ms``.

    Raises:
        ArgumentTypeError: If it is none.
    """
    return _quantity(text, _TIMES, "a time such as 20ms, 50us or 0.2s")


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None or found["unit"].lower() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return float(found["number"]) * units[found["unit"].lower()]
