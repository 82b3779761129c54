"""The demo's one table."""

from __future__ import annotations

from rich.table import Table

from examples.demo.comparison import Outcome, WeightDifference


def comparison_table(
    title: str, compute_seconds: float, reference: Outcome, candidate: Outcome, weights: WeightDifference
) -> Table:
    """Lays out two runs side by side.

    Args:
        title: What was trained where.
        compute_seconds: The typical step of the same ranks training alone.
        reference: The run that the other one is compared with.
        candidate: The run under the strategy on show.
        weights: How the final weights of the two differ.
    """
    table = Table(title=title, caption=_caption(compute_seconds, reference, candidate), caption_justify="left")
    table.add_column("")
    table.add_column(reference.strategy, justify="right")
    table.add_column(candidate.strategy, justify="right")
    both = (reference, candidate)
    table.add_row("validation loss (nats per character)", *(f"{run.validation_loss:.6f}" for run in both))
    table.add_row("median step", *(f"{1e3 * run.step_seconds:.0f} ms" for run in both))
    table.add_row("speed-up", "1.00x", f"{reference.step_seconds / candidate.step_seconds:.2f}x")
    table.add_row("communication hidden, estimated", *(_share(run.hidden_estimate) for run in both))
    table.add_row("communication hidden, in its timeline", *(_share(run.hidden_in_timeline) for run in both))
    table.add_row("ranks agree on the final weights", *("yes" if run.ranks_agree else "NO" for run in both))
    table.add_row("final weights", f"{weights.tensors} tensors", _verdict(weights))
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _verdict(weights: WeightDifference) -> str:
    if not weights.different:
        return "identical, bit for bit"
    return f"{len(weights.different)} differ, by up to {weights.maximum:.1e}"


def _caption(compute_seconds: float, reference: Outcome, candidate: Outcome) -> str:
    communication = min(reference.communication_seconds, candidate.communication_seconds)
    text = (
        f"A step takes {1e3 * compute_seconds:.0f} ms of computing alone; all-reducing its gradients takes "
        f"{1e3 * communication:.0f} ms with nothing else going on. Hidden, estimated = 1 - (median step - "
        "computing alone) / communication alone: processor time spent on communication counts as not hidden."
    )
    if None in (reference.hidden_estimate, candidate.hidden_estimate):
        text += (
            " It cannot be told (-) if there is hardly any communication, or if a step takes longer than both "
            "together, because something else uses this machine."
        )
    return text
