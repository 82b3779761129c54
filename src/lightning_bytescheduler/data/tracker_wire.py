"""How what workers and the slice tracker tell each other travels: one line of JSON for each message."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, TypeAlias

from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.tracker_messages import (
    Answer,
    Assignment,
    Begin,
    Done,
    EpochOver,
    Join,
    JoinAgain,
    Joined,
    Leave,
    Progress,
    Quarantine,
    Receipt,
    Renew,
    Request,
    Verdict,
    Wait,
    WaitReason,
)
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Call", "Reply", "decode", "encode"]

Call: TypeAlias = Join | Request | Begin | Progress | Done | Quarantine | Renew | Leave
Reply: TypeAlias = Joined | Answer | Receipt

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Join,
        Request,
        Begin,
        Progress,
        Done,
        Quarantine,
        Renew,
        Leave,
        Joined,
        Assignment,
        Wait,
        EpochOver,
        JoinAgain,
        Receipt,
    )
}
_READ = {"verdict": Verdict, "reason": WaitReason}


def encode(message: Call | Reply) -> str:
    """Write a message."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, allow_nan=False)


def decode(text: str | bytes) -> Call | Reply:
    """Read what :func:`encode` wrote.

    Raises:
        OptionError: If it is no such message.
    """
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        for field in fields(kind):
            value = values.get(field.name)
            if isinstance(value, list):
                values[field.name] = tuple(value)
            elif field.name == "slice":
                values[field.name] = Slice(**value)
            elif field.name in _READ and kind is not Quarantine:  # whose reason is a text
                values[field.name] = _READ[field.name](value)
        message: Call | Reply = kind(**values)
        return message
    except OptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError("message", text, f"a message of the slice tracker ({error})") from error
