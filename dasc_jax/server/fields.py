"""Typed reading of a JSON object: each refusal names the field, the value and what was expected."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from dasc_jax.server.errors import ApiError


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ApiError: 400, when it is no JSON or no object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {kind(value)}", code="invalid_json")
    return value


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if isinstance(value, bool):
        return "a boolean"
    names = ((type(None), "null"), (str, "a string"), (int, "an integer"), (float, "a number"))
    return next(
        (name for cls, name in (*names, (list, "an array")) if isinstance(value, cls)), "an object"
    )


def show(value: Any) -> str:
    """A value as JSON, cut so that it fits a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """The fields of a body. A field that is null reads as absent.

    Args:
        body: the JSON object.
        path: how messages name the object itself ("" for the body).
    """

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self.body = {name: value for name, value in body.items() if value is not None}
        self.path = f"{path}." if path else ""

    def refuse(self, name: str, expected: str) -> ApiError:
        """The error for a field whose value is not what was `expected`."""
        return ApiError(
            f"{self.path}{name} is {show(self.body.get(name))}; it must be {expected}",
            param=self.path + name,
        )

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """An integer in [low, high]."""
        value = self.body.get(name, default)
        if value is None or (is_int(value) and low <= value <= high):
            return value
        raise self.refuse(name, f"an integer in [{low}, {high}]")

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.body.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) < 1e30:
                return float(value)
        raise self.refuse(name, "a finite number")

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.body.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def string(self, name: str, default: str, longest: int) -> str:
        """A string of at most `longest` characters, encodable as UTF-8."""
        value = self.body.get(name, default)
        if not isinstance(value, str) or len(value) > longest or not encodable(value):
            raise self.refuse(name, f"a string of at most {longest} characters")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """One of the `allowed` strings."""
        value = self.body.get(name)
        if value is not None and value not in allowed:
            raise self.refuse(name, f"one of {', '.join(allowed)}")
        return value

    def neutral(self, name: str, fine: Callable[[Any], bool], expected: str) -> None:
        """A field that is accepted only where it changes nothing."""
        if name in self.body and not fine(self.body[name]):
            raise ApiError(
                f"{self.path}{name} is not supported; leave it out or set it to {expected}",
                param=self.path + name,
                code="unsupported_parameter",
            )

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse every field that nothing reads, by name."""
        unknown = sorted(set(self.body) - set(known))
        if unknown:
            raise ApiError(
                f"unknown field{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(self.path + name for name in unknown)}",
                param=self.path + unknown[0],
                code="unknown_parameter",
            )


def encodable(text: str) -> bool:
    """Whether a string is Unicode text: JSON can carry half of a surrogate pair, UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
