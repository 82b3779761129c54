"""Hints of Lightning and PyTorch, with the names that this package's strategies have.

Both know DDP's names alone: who follows ``strategy='ddp_find_unused_parameters_true'`` or ``ddp_notebook`` to the
letter has left this package without noticing. Messages are changed where they pass a strategy of ours, in the exception
itself: its class, its traceback and the rest of its words stay.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from lightning_bytescheduler.lightning_api import DDPStrategy, MisconfigurationException

__all__ = ["OwnNames"]

# Not every 'ddp': this package's own errors send users there where nothing else helps.
_UNUSED = re.compile(r"'ddp(?P<variant>(?:_spawn|_fork|_notebook)?_find_unused_parameters_(?:true|false))'")
_ANOTHER_LAUNCHER = 'you can run with `strategy="ddp"`'
_EITHER = re.compile(r"either by setting the string value `[^`]*` or by setting")
_CONNECTOR = f"{DDPStrategy.__module__.partition('.strategies')[0]}.trainer.connectors.accelerator_connector"


@dataclass(frozen=True, slots=True)
class OwnNames:
    """What a strategy is called where DDP's names are shown.

    Attributes:
        name: As ``strategy=`` has it.
        with_option: The strategy with an option of DDP's; ``{option}`` stands for its name, and its value is ``True``.
        unused_variants: Whether there are names that end in ``_find_unused_parameters_true``.
    """

    name: str
    with_option: str
    unused_variants: bool = True

    def put(self, text: str) -> str:
        """A message with these names in place of DDP's."""
        if not self.unused_variants:
            text = _EITHER.sub("by setting", text)
        text = _UNUSED.sub(lambda hit: f"'{self.name}{hit['variant']}'", text)
        text = text.replace(_ANOTHER_LAUNCHER, f'you can run with `strategy="{self.name}"`')
        for option in ("find_unused_parameters", "static_graph"):
            text = text.replace(f"DDPStrategy({option}=True)", self.with_option.format(option=option))
        text = text.replace(
            "passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`",
            f"using `strategy={self.with_option.format(option='find_unused_parameters')}`",
        )
        return text.replace("_set_static_graph()", f"`strategy={self.with_option.format(option='static_graph')}`")

    def put_into(self, exception: BaseException) -> None:
        """Change the words of ``exception``, where they have DDP's names."""
        args = tuple(self.put(arg) if isinstance(arg, str) else arg for arg in exception.args)
        if args != exception.args:
            exception.args = args

    def require_for_notebook(self, launcher: object) -> None:
        """Refuse to launch what a notebook cannot, before Lightning does so with DDP's names.

        Raises:
            MisconfigurationException: As Lightning's.
        """
        interactive = getattr(sys.modules.get(_CONNECTOR), "_IS_INTERACTIVE", False)
        if interactive and launcher is not None and not getattr(launcher, "is_interactive_compatible", True):
            raise MisconfigurationException(
                f"`Trainer(strategy={self.name!r})` is not compatible with an interactive environment, such as a "
                f"notebook. Use `Trainer(strategy='{self.name}_notebook')`, or run the code as a script. If you start "
                "the processes yourself, create the Trainer in each of them."
            )
