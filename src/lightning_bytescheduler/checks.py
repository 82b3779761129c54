"""Checks of options: each says what is wrong, with the option's name, and what is allowed.

Every ``require_*`` returns the value it was given, and raises :class:`OptionError` if that is not allowed.
``importing`` names a package that is not installed, and says what to install.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from lightning_bytescheduler.exceptions import OptionError

_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)

_FLOAT_BYTES = 4
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d*)?(?:e\d+)?)\s*(b|[kmgt]i?)?\s*(b|bytes?|parameters|params)?", re.IGNORECASE)
_PREFIXES = ["", "k", "m", "g", "t"]


@contextmanager
def importing(feature: str, *, extra: str | None = None) -> Iterator[None]:
    """Make failed imports within this context say what the packages are for, and what to install.

    Args:
        feature: What needs the packages, as the subject of a sentence.
        extra: The extra of this package that installs them; ``None`` if they are installed by their own names.

    Raises:
        ImportError: If an import inside fails; names the feature, the package and the extra.
    """
    try:
        yield
    except ImportError as error:
        # fsspec raises an error of its own, whose cause names the package.
        name = error.name or getattr(error.__cause__, "name", None) or "a package"
        package = name.partition(".")[0]
        is_missing = isinstance(error if error.name else error.__cause__ or error, ModuleNotFoundError)
        state = "is not installed" if is_missing else f"cannot be imported ({error})"
        install = f"'lightning-bytescheduler[{extra}]'" if extra else package
        raise ImportError(f"{feature} needs {package}, which {state}: pip install {install}", name=name) from error


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Make errors within this context name options as a command does: as ``names`` say, else ``--its-name``."""
    try:
        yield
    except OptionError as error:
        option = error.option
        usual = f"--{option.replace('_', '-')}" if option.isidentifier() and option.islower() else option
        raise OptionError(names.get(option, usual), error.value, error.allowed, error.hint) from error


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether ``value`` is a whole number, ``least`` or more; ``True`` and ``False`` are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, neither infinite nor NaN; ``True`` and ``False`` are none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def require_bool(option: str, value: object) -> bool:
    """Return ``value`` if it is ``True`` or ``False``.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not isinstance(value, bool):
        raise OptionError(option, value, "True or False")
    return value


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_whole(value, least):
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value


def require_size(option: str, value: object) -> int:
    """Return ``value`` if it is a size, in parameters: a whole number above 0.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_whole(value, 1):
        size = parameters_in(value, billions=False) if isinstance(value, str) else None
        hint = "" if size is None else f"{value} = {size:,} parameters: {option}={size:_}."
        raise OptionError(option, value, "a positive whole number of parameters", hint)
    return value


def parse_size(option: str, value: object) -> int:
    """Return ``value`` as a size, in parameters.

    Args:
        option: Its name.
        value: A positive whole number, also as a text or as a float, such as ``16e6``: ByteScheduler's published code
            reads its variables by ``int()`` and ``float()``.

    Raises:
        OptionError: If it is none; names ``option``, and converts a size in bytes.
    """
    # A text that is no number stays as it is, and is refused; int() of infinity or NaN raises.
    with contextlib.suppress(ArithmeticError, ValueError):
        number = Decimal(value) if isinstance(value, (str, float)) else Decimal()  # exact, also above 2**53
        if 0 < number < 10**31 and number == int(number):  # int() of 1e999999 takes long
            return int(number)
    return require_size(option, value)


def require_positive(option: str, value: object, *, of: str = "") -> float:
    """Return ``value`` if it is a finite number above 0.

    Args:
        option: Its name.
        value: What was given.
        of: Its unit, for the message.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value <= 0:
        raise OptionError(option, value, f"a finite number{of and f' of {of}'}, more than 0")
    return value


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number of seconds, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value < 0:
        raise OptionError(option, value, "a finite number of seconds, 0 or more")
    return value


def require_share(option: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or not 0 <= value <= 1:
        raise OptionError(option, value, "a number from 0 to 1")
    return value


def require_one_of(option: str, value: _T, allowed: Iterable[_T]) -> _T:
    """Return ``value`` if it is one of ``allowed``.

    Raises:
        OptionError: If it is not; names ``option`` and what is allowed.
    """
    choices = list(allowed)
    if value not in choices:
        hint = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
        raise OptionError(option, value, f"one of {', '.join(map(repr, choices))}", hint)
    return value


def require_text(option: str, value: object) -> str:
    """Return ``value`` if it is a text.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not isinstance(value, str):
        raise OptionError(option, value, "a text")
    return value


def require_new_file(option: str, value: object) -> str:
    """Return ``value`` as text if it is the path of a file that can probably be written.

    Missing folders are allowed, and are not made here. ``~`` is the user's home.

    Raises:
        OptionError: If it is not: no path, a folder, or below a file or a folder that may not be written to.
    """
    given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given:
        raise OptionError(option, value, "a file path")
    path = os.path.expanduser(given)
    if os.path.isdir(path) or path.endswith(os.sep):
        raise OptionError(option, value, "a file path, and that is a folder")
    place = whole = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent  # the rest is made when it is needed
    if place != whole and not place.is_dir():
        raise OptionError(option, value, f"a file in a folder, and {os.fspath(place)!r} is none")
    if not os.access(place, os.W_OK | (os.X_OK if place != whole else 0)):
        raise OptionError(option, value, f"a file that may be written, and {os.fspath(place)!r} may not be written to")
    return path


def records_in(run: str | os.PathLike[str], name: str) -> list[Path]:
    """Find a run's records, the newest first: in a folder, or up to three levels below it, where loggers put versions.

    Args:
        run: The record itself; the folder that it is in; or a folder above, such as ``lightning_logs``.
        name: File name of the record.

    Raises:
        OptionError: If there is no such record; says where it was looked for.
    """
    path = Path(run)
    if path.is_file():
        return [path]
    if not path.is_dir():
        places = f"lightning_logs, lightning_logs/version_0 or {name}"
        raise OptionError("RUN", os.fspath(run), f"a file or a folder that is there, such as {places}")
    found = [file for depth in ("", "*/", "*/*/", "*/*/*/") for file in path.glob(depth + name) if file.is_file()]
    if not found:
        raise OptionError("RUN", os.fspath(run), f"a folder with {name} in it, or in one of its folders version_*")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, os.fspath(file)), reverse=True)


def read_lines(file: str | os.PathLike[str], read: Callable[[bytes], _T], what: str) -> list[_T]:
    """Read what a run has recorded, one thing to a line. A last line that a crash cut off is left out.

    Args:
        file: The record.
        read: Reads a line.
        what: What the file should hold, in words.

    Raises:
        OptionError: If the file is something else; names the line, and what is wrong with it.
        OSError: If the file cannot be read.
    """
    import msgspec  # here, as the other checks do not need it

    lines = Path(file).read_bytes().split(b"\n")
    found: list[_T] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(read(line))
        except (ValueError, msgspec.DecodeError) as error:
            if number == len(lines) and found:
                break  # the last line, without a newline, was cut off
            raise OptionError("record", f"{os.fspath(file)}:{number}", f"{what}, one to a line ({error})") from error
    return found


def did_you_mean(value: object, known: Collection[str]) -> str:
    """Return a hint for a misspelt name, such as ``Did you mean 'credit'?``; empty if no known name is close."""
    if not isinstance(value, str):
        return ""
    by_lower = {_plain(name): name for name in known if name not in ("-h", "--help")}
    given = _plain(value)
    close = difflib.get_close_matches(given, by_lower, n=1, cutoff=0.7)
    # Letters left out at an end make a larger difference than a wrong letter.
    close = close or [name for name in by_lower if len(given) > 3 and given in name]
    close = close or difflib.get_close_matches(given, by_lower, n=1)
    return f"Did you mean {by_lower[close[0]]!r}?" if close else ""


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first of ``names``, and the number of the others, in words."""
    shown = ", ".join(map(repr, names[:most]))
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def require_known(
    given: Mapping[str, object] | Iterable[str],
    known: Iterable[str],
    *,
    of: str,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Refuse unknown options.

    Args:
        given: The given options by name, with values if they are known.
        known: Names of existing options.
        of: What they belong to, such as the name of a class.
        elsewhere: Hints for options that belong elsewhere, by name: whole sentences.

    Raises:
        OptionError: Names the option, the one that was probably meant, and the existing ones.
    """
    known = list(dict.fromkeys(known))
    values = given if isinstance(given, Mapping) else {}
    for name in given:
        if name not in known:
            hint = (elsewhere or {}).get(name) or did_you_mean(name, known)
            says = " ".join(
                filter(None, [f"{of} has no option {name!r}.", hint, f"Its options are {', '.join(known)}."])
            )
            raise OptionError(name, values.get(name), f"an option of {of}", hint, says=says)


def options_by_name(cls: _Class) -> _Class:
    """Make a class suggest the option that was meant, if one is misspelt or given without its name.

    Python's own ``TypeError`` names neither the existing options nor the option to which a nameless value belongs.
    """
    construct: Any = vars(cls)["__init__"]
    parameters = list(inspect.signature(construct).parameters.values())[1:]
    known = [parameter.name for parameter in parameters]
    places = sum(parameter.kind is not inspect.Parameter.KEYWORD_ONLY for parameter in parameters)

    @functools.wraps(construct)
    def checked(self: object, *values: object, **options: object) -> None:
        if places < min(len(values), len(known)):
            example = ", ".join(map("{}={!r}".format, known[places:], values[places:]))
            says = f"{cls.__name__} takes its options by name, as in {cls.__name__}({example})."
            raise OptionError(known[places], values[places], "given by name", says=says)
        elsewhere: Mapping[str, str] = getattr(cls, "_options_elsewhere", {})
        require_known(options, known, of=cls.__name__, elsewhere=elsewhere)
        construct(self, *values, **options)

    setattr(cls, "__init__", checked)  # noqa: B010  # mypy refuses the assignment
    return cls


_VARIABLES = (
    "BYTESCHEDULER_COORDINATOR",
    "BYTESCHEDULER_COORDINATOR_TOKEN",
    "BYTESCHEDULER_CREDIT",
    "BYTESCHEDULER_CREDIT_TUNING",
    "BYTESCHEDULER_DEBUG",
    "BYTESCHEDULER_LIGHTNING",
    "BYTESCHEDULER_PARTITION",
    "BYTESCHEDULER_PARTITION_TUNING",
    "BYTESCHEDULER_ROOT_IP",
    "BYTESCHEDULER_ROOT_PORT",
    "BYTESCHEDULER_SLICES_TOKEN",
    "BYTESCHEDULER_TIMELINE",
)
_LOOKS_LIKE_OURS = ("BYTESCHED", "BYTESHED")  # without underscores


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each environment variable that looks like this package's but is unknown.

    Args:
        environ: Where to look.
    """
    sentences = []
    for name in sorted(environ):
        if name not in _VARIABLES and name.upper().replace("_", "").startswith(_LOOKS_LIKE_OURS):
            hint = did_you_mean(name, _VARIABLES)
            sentences.append(f"The environment variable {name} has no meaning here. {hint}".rstrip())
    return sentences


def parameters_in(text: str, *, billions: bool = True) -> int | None:
    """Return the parameters in ``350M``, ``7B`` or ``100MB`` (of fp32 gradients); ``None`` if the text is no size.

    Args:
        text: A number and its unit.
        billions: Whether a lone ``B`` means billions, as in a model's size; else it means bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (found[2] or found[3]):
        return None
    prefix, unit = (found[2] or "").lower(), (found[3] or "").lower()
    if prefix == "b":
        prefix, unit = ("g", unit) if billions else ("", "b")
    number = float(found[1].replace("_", "")) * (1024 if prefix.endswith("i") else 1000) ** _PREFIXES.index(prefix[:1])
    number /= _FLOAT_BYTES if unit.startswith("b") else 1
    return round(number) if 1 <= number < math.inf else None
