"""The demo's command line: ``python -m examples.demo``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.shaped_link import LinkError, ShapedLink
from examples.demo.budget import affordable_steps, balanced_mbit, communication_seconds
from examples.demo.comparison import WARM_UP_STEPS, outcome, typical_step_seconds, weight_difference
from examples.demo.launch import SILENCE_SECONDS, RunFailed, train
from examples.demo.options import Options, parse
from examples.demo.progress import DemoProgress
from examples.demo.report import RankResult
from examples.demo.run_spec import ALONE, BYTESCHEDULER, DDP, RANKS
from examples.demo.table import comparison_table

# The strategy on show, compared with DDP.
CANDIDATE = BYTESCHEDULER

_STEPS_ALONE = WARM_UP_STEPS + 5
# Links slower than expected, and steps that wait for several messages, must not pass for a hang.
_MESSAGES_OF_SILENCE = 10


def run(options: Options, console: Console) -> None:
    """Runs the demo.

    Args:
        options: The command line.
        console: Where to show it.

    Raises:
        RunFailed: If a training fails or hangs, or could not run at all.
        LinkError: If the system refuses to build the link after all.
    """
    if importlib.util.find_spec("lightning_bytescheduler") is None:
        raise RunFailed("The package lightning_bytescheduler is not installed; `make demo` installs it.")
    shaped = _may_shape(options, console)
    # As many ranks as will train together, because they share the processors and the memory.
    alone = [options.spec(f"{ALONE}-{rank}", ALONE, steps=_STEPS_ALONE) for rank in range(RANKS)]
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(DemoProgress(console))
        with progress.training("computing alone", _STEPS_ALONE) as on_step:
            baseline = train(alone, None, on_step)
        link, communication = None, 0.0
        if shaped:
            link = stack.enter_context(ShapedLink(RANKS, options.mbit or balanced_mbit(baseline)))
            communication = communication_seconds(baseline, link.mbit)
            console.print(_explanation(link, typical_step_seconds(baseline), communication), highlight=False)
        steps = options.steps or affordable_steps(baseline, communication)
        silence = SILENCE_SECONDS + _MESSAGES_OF_SILENCE * communication
        progress.expect(2 * steps)
        place = {"devices": RANKS} if link is None else {"nodes": RANKS}
        results = []
        for number, strategy in enumerate((DDP, CANDIDATE), start=1):
            spec = options.spec(f"{number}-{strategy}", strategy, steps=steps, **place)
            with progress.training(strategy, steps) as on_step:
                results.append(train([spec], link, on_step, silence))
    where = "over loopback" if link is None else f"over a link of {link.mbit:g} Mbit/s"
    title = f"{baseline[0].parameters:,} parameters, {steps} steps {where}"
    _show(options, console, title, baseline, *results)


def _may_shape(options: Options, console: Console) -> bool:
    available, reason = False, "The link is not shaped, as asked."
    if options.shaping:
        available, reason = ShapedLink.available()
    if not available:
        console.print(
            f"{reason} Both ranks talk over the loopback interface, which is so fast that there is little "
            "communication to hide: expect the same weights, at about the same speed."
        )
    return available


def _explanation(link: ShapedLink, compute_seconds: float, communication: float) -> str:
    return (
        "Two network namespaces stand for two hosts. The link between them is limited to "
        f"{link.mbit:g} Mbit/s in each direction. Nothing else on this machine is touched, and they are "
        "removed afterwards.\n"
        f"A step computes for {1e3 * compute_seconds:.0f} ms; its gradients take this link "
        f"{1e3 * communication:.0f} ms."
    )


def _show(
    options: Options,
    console: Console,
    title: str,
    baseline: Sequence[RankResult],
    ddp: Sequence[RankResult],
    candidate: Sequence[RankResult],
) -> None:
    # Imported here because it imports Lightning, which takes seconds the progress bars need not wait for.
    from examples.demo.timeline import hidden_share, picture

    timeline = options.timeline if CANDIDATE == BYTESCHEDULER else None
    compute_seconds = typical_step_seconds(baseline)
    first = outcome(DDP, ddp, compute_seconds, None)
    second = outcome(CANDIDATE, candidate, compute_seconds, hidden_share(timeline) if timeline else None)
    weights = weight_difference(ddp[0], candidate[0])
    console.print()
    console.print(comparison_table(title, compute_seconds, first, second, weights))

    if options.bucket_mb is None:
        # Part of the speed-up is owed to buckets too large for the model; the reader should know.
        console.print("DDP's default buckets of 25 MB hold nearly all of this model; --bucket-mb 2 suits it better.\n")
    results = options.output / "results.json"
    content = {"title": title, "compute_seconds": compute_seconds, "runs": [asdict(first), asdict(second)]}
    results.write_text(json.dumps({**content, "weights": asdict(weights)}, indent=2) + "\n")
    console.print(f"Results   {results}", soft_wrap=True)
    if timeline is not None:
        console.print(f"Timeline  {timeline} (open it in https://ui.perfetto.dev)", soft_wrap=True)
        console.print(f"Picture   {picture(timeline)}", soft_wrap=True)
    for result in (ddp[0], candidate[0]):
        if result.weights is not None:
            Path(result.weights).unlink()


def main() -> int:
    """Runs the demo as the command line says.

    Returns:
        The exit status.
    """
    options = parse()
    console = Console()
    try:
        run(options, console)
    except (LinkError, RunFailed) as error:
        # Not as markup: logs are full of brackets.
        message = f"\nThe demo failed. {error}"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped; all processes were ended and the link, if there was one, removed.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
