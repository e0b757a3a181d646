"""The text form of a method, as `attach` and the command line take it: `kakurenbo:max_fraction=0.4:tau=0.5`."""

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from thresher.methods.registry import nearest_name

LITERALS = {"true": True, "false": False, "none": None}


def parse(text: str, arguments: Collection[str] = ()) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Splits the text form of a method into its name, its settings, and arguments of `attach`.

    Args:
        text: Name, and settings as `:setting=value`. A value that is not a number, True, False, None, a list or a tuple is a
            string.
        arguments: Names that are arguments of `attach`, in the order to return them. Default: none.

    Raises:
        ValueError: A setting does not have the form `setting=value`, or is given twice.

    Example:
        >>> parse("kakurenbo:max_fraction=0.4:spend=batches", ["spend"])
        ('kakurenbo', {'max_fraction': 0.4}, {'spend': 'batches'})
    """
    name, *settings = split_outside_brackets(text, ":")
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{text!r}: write settings as name:setting=value, got {setting!r}")
        if key in parsed:
            raise ValueError(f"{text!r}: the setting {key!r} is given twice")
        parsed[key] = _value(value)
    given = {key: parsed.pop(key) for key in arguments if key in parsed}
    return name, parsed, given


def validate_settings(
    name: str, kind: type, settings: Mapping[str, Any], arguments: Collection[str] = ()
) -> None:
    """Checks that a method has the given settings, that it needs no others, and that numbers and booleans are such.

    Args:
        name: Name of the method, for messages.
        kind: Class of the method.
        settings: Settings by name.
        arguments: Arguments of `attach` that the text form of this method takes, for messages. Default: none.

    Raises:
        ValueError: A setting is unknown, missing or of another kind.
    """
    parameters = inspect.signature(kind).parameters
    for key, value in settings.items():
        if key not in parameters:
            known = (*parameters, *arguments)
            near = nearest_name(key, known)
            question = f"did you mean {near!r}? It" if near else "it"
            raise ValueError(
                f"{name} has no setting {key!r}; {question} has {', '.join(known) or 'none'}"
            )
        default = parameters[key].default
        boolean = isinstance(default, bool)
        if isinstance(default, int | float) and (
            isinstance(value, bool) != boolean or not isinstance(value, int | float)
        ):
            allowed = "True or False" if boolean else "a number"
            raise ValueError(f"{name}: `{key}` is {allowed}, got {value!r}")
    # A guess would be a method that nobody chose.
    needed = [
        f"{key}=..."
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in settings
    ]
    if needed:
        raise ValueError(
            f"{name} has settings without a default; write {':'.join((name, *needed))} or "
            f"{kind.__name__}({', '.join(needed)})"
        )


def split_outside_brackets(text: str, separator: str) -> Iterator[str]:
    """Yields the parts of a text between separators; separators inside brackets do not count.

    Args:
        text: The text.
        separator: One character.
    """
    part = ""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def _value(text: str) -> Any:
    if text.lower() in LITERALS:
        return LITERALS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
