"""The text form of a method, as `attach` and the command line take it: `kakurenbo:max_fraction=0.4:tau=0.5`."""

import ast
from collections.abc import Iterator
from typing import Any

LITERALS = {"true": True, "false": False, "none": None}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Splits the text form of a method, and returns its name and its settings by name.

    Args:
        text: Name, and settings as `:setting=value`. A value that is not a number, True, False, None, a list or a tuple is a
            string.

    Raises:
        ValueError: A setting does not have the form `setting=value`, or is given twice.

    Example:
        >>> parse("kakurenbo:max_fraction=0.4:refresh=eval")
        ('kakurenbo', {'max_fraction': 0.4, 'refresh': 'eval'})
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
    return name, parsed


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
