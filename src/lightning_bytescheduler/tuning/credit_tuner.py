"""The callback that chooses credit, partition size or plain DDP while ``fit`` runs. It works on rank 0.

Each decision comes into force on all ranks before the same step (``ddp/decided_fit.py``). A few steps wait for
milliseconds while the search proposes a point. The libraries for that are imported before the fit, unless it begins
with DDP's steps.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_bytescheduler.checks import options_by_name, require_new_file
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info, rank_zero_warn
from lightning_bytescheduler.registration import require_same_package
from lightning_bytescheduler.tuning.record import RECORD_NAME, TrialEntry, TuningIdentity, append_entries
from lightning_bytescheduler.tuning.search import CreditTuning, TuningOptions, prepare
from lightning_bytescheduler.tuning.sizes import SearchSpace, TuningPoint

STATE_KEY = "bytescheduler_tuning"
"""Key of the tuner's state in a checkpoint. It is not a callback's state: Lightning would warn of a missing callback
wherever a checkpoint is used without one, such as with DDP."""


@options_by_name
class CreditTuner(pl.Callback):
    """Finds the credit, and with ``tuning="both"`` the partition size, with which steps are fastest.

    ``ByteSchedulerStrategy`` adds one itself unless tuning is switched off. Add one to the Trainer's callbacks to set
    its limits. The strategy's ``tuning`` says what is tuned.

    Step times are medians, so steps with a validation, a checkpoint or the end of an epoch change them little.

    Args:
        trials: Most points that a search tries, including the one in force and plain DDP; at least 2.
        steps_per_trial: Most steps of a trial; most trials end earlier.
        cost_share: What trials may cost, as a share of the time of all steps since the search began, and from the start
            of 500 steps.
        record: File to which rank 0 adds a line for each trial, for ``lightning-bytescheduler tuning``. If left out,
            ``tuning.jsonl`` in the directory of the Trainer's logger; without a logger, in the Trainer's
            ``default_root_dir`` if it was given; else there is no record.

    Raises:
        OptionError: Names the option that is not allowed.
    """

    def __init__(
        self,
        *,
        trials: int = 15,
        steps_per_trial: int = 100,
        cost_share: float = 0.02,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        if record is not None:
            record = require_new_file("record", record)
        self._options = TuningOptions(trials=trials, steps_per_trial=steps_per_trial, cost_share=cost_share)
        self._record_option = record
        self._record: Path | None = None
        self._search: CreditTuning | None = None
        self._state: dict[str, Any] | None = None  # a checkpoint's, until a fit begins
        self._said: tuple[bool, bool] | None = None  # the last verdict that was logged

    # What the strategy calls, on rank 0.

    def begin(
        self,
        *,
        space: SearchSpace,
        start: TuningPoint,
        identity: TuningIdentity,
        plain_ddp: bool,
        as_ddp: bool,
        folder: str | None,
    ) -> TuningPoint:
        """Begin a fit, from a checkpoint's state or the last fit's if there is one.

        Args:
            space: The points to search.
            start: Sizes without tuning.
            identity: What the results hold for.
            plain_ddp: Whether plain DDP is among the candidates.
            as_ddp: Whether to begin with it.
            folder: The record's folder, unless the user has named a file.

        Returns:
            The point to put in force before the first step.
        """
        file = self._record_option or (None if folder is None else os.path.join(folder, RECORD_NAME))
        self._record, self._said = None if file is None else Path(file), None
        options = replace(self._options, plain_ddp=plain_ddp)
        search = CreditTuning(space, start=start, identity=identity, options=options, as_ddp=as_ddp)
        state = self._known()
        try:
            if state is not None and search.load_state_dict(state) and state["trials"]:
                rank_zero_info(f"bytescheduler: tuning goes on from where it was, with {search.current}.")
        except OptionError as error:
            rank_zero_warn(f"The tuning in the checkpoint cannot be read, and begins anew: {error}")
        if search.tunes_sizes and not search.current.is_plain_ddp:
            prepare()
        self._search, self._state = search, None
        return search.current

    @property
    def search(self) -> CreditTuning:
        """The search of this fit, or of the last one.

        Raises:
            UnsupportedError: If nothing was tuned yet, or on ranks above 0.
        """
        if self._search is None:
            raise UnsupportedError("CreditTuner decides nothing outside of a fit that ByteSchedulerStrategy tunes.")
        return self._search

    @property
    def current(self) -> TuningPoint:
        """The latest decision.

        Raises:
            UnsupportedError: If nothing is tuned.
        """
        return self.search.current

    @property
    def is_settled(self) -> bool:
        """Whether a choice holds until the step time drifts; ``False`` while nothing is tuned."""
        return self._search is not None and self._search.is_settled

    @property
    def entries(self) -> tuple[TrialEntry, ...]:
        """The trials and choices of this fit, or the last one, in order; empty on ranks above 0."""
        return () if self._search is None else self._search.entries

    def step_took(self, step: int, seconds: float, *, as_decided: bool, hideable: float | None = None) -> None:
        """Note the time of a step, from its forward pass to the next step's. Decide, then record and log the decision.

        Args:
            step: Its number.
            seconds: Its time, by this rank's clock or its GPU.
            as_decided: Whether it was taken at `current`.
            hideable: Seconds that overlap could hide in a typical plain DDP step; ``None`` if that is not known.
        """
        search, known = self.search, len(self.entries)
        # Exchanges are rare while nothing is tried, so the first decision after such a time comes into force late.
        if not (as_decided or step < search.in_force_from):
            return
        search.step_took(step, seconds, hideable=hideable)
        new = search.entries[known:]
        self._write(new)
        for entry in new:
            if entry.kind == "drift":
                self._said = None
                ms = 1e3 * entry.time.seconds
                rank_zero_info(f"bytescheduler: steps have changed, to {ms:.1f} ms: tuning begins anew.")
        verdict = search.verdict
        if verdict is not None and verdict != self._said:
            as_ddp, compared = self._said = verdict
            way = f"{'are from here on' if compared else 'stay'} {'synchronised' if as_ddp else 'overlapped'}"
            searches = search.tunes_sizes and not as_ddp and not search.is_settled
            more = " How much travels at once is tuned while training." if searches else ""
            rank_zero_info(f"bytescheduler: steps {way}: {search.standing}.{more}")

    def _known(self) -> dict[str, Any] | None:
        """What a checkpoint says, or else the last search, which may be of this fit."""
        return self._search.state_dict() if self._state is None and self._search is not None else self._state

    def _write(self, entries: tuple[TrialEntry, ...]) -> None:
        if not entries or self._record is None:
            return
        try:
            append_entries(self._record, entries)
        except OSError as error:
            rank_zero_warn(f"The record of the tuning is no longer written, as {self._record} failed: {error}")
            self._record = None

    # Lightning's hooks.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that have nothing to tune, and a second tuner.

        Raises:
            UnsupportedError: If the strategy is another one, if there would be two tuners, or if the Trainer is from
                the other package of Lightning.
        """
        require_same_package(trainer, "CreditTuner")
        if stage != "fit":
            return
        if not getattr(trainer.strategy, "has_sizes_to_tune", False):
            raise UnsupportedError(
                f"CreditTuner tunes ByteSchedulerStrategy, not {type(trainer.strategy).__name__}: use "
                "Trainer(strategy='bytescheduler'), or leave the callback out."
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if sum(isinstance(callback, CreditTuner) for callback in callbacks) > 1:
            raise UnsupportedError("The Trainer has more than one CreditTuner among its callbacks: leave one of them.")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state to a checkpoint."""
        if (state := self._known()) is not None:
            checkpoint[STATE_KEY] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep a checkpoint's state for `begin`."""
        self._state = checkpoint.get(STATE_KEY, self._state)
