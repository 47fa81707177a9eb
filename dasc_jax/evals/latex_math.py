r"""Short mathematical answers as numbers: a small part of LaTeX, evaluated at given variables.

Whole numbers and fractions stay exact; roots, functions and constants are floats. This is no
computer algebra system: what is outside the grammar below raises MathError.

    sum     = product (("+" | "-") product)*
    product = power (("*" | "/")? power)*
    power   = ("+" | "-") power | postfix ("^" power)?
    postfix = atom "!"*
    atom    = number | letter | constant | group | "|" sum "|" | \lfloor sum \rfloor
            | \frac atom atom | \binom atom atom | \sqrt ("[" sum "]")? atom
            | function ("_" atom)? ("^" atom)? power
    group   = "(" sum ")" | "[" sum "]" | "{" sum "}"
"""

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

Value = Fraction | float

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "\\sin": math.sin,
    "\\cos": math.cos,
    "\\tan": math.tan,
    "\\arcsin": math.asin,
    "\\arccos": math.acos,
    "\\arctan": math.atan,
    "\\ln": math.log,
    "\\log": math.log,
    "\\exp": math.exp,
}
CONSTANTS = {"\\pi": math.pi, "e": math.e, "\\infty": math.inf}
SYMBOLS = {"\\cdot": "*", "\\times": "*", "\\div": "/", "−": "-", "·": "*", "×": "*", "π": "\\pi"}
CLOSING = {"(": ")", "[": "]", "{": "}"}
ROUNDING = {"\\lfloor": ("\\rfloor", math.floor), "\\lceil": ("\\rceil", math.ceil)}
FORMS = frozenset({"\\frac", "\\binom", "\\sqrt"})

EXACT_BITS = 100_000
"""Largest exact power, in bits; past it a power is a float, or has no value."""
EXACT_FACTORIAL = 2_000

TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[A-Za-z]+|[A-Za-z](?:_(?:\w|\{\w+\}))?|\S")


class MathError(ValueError):
    """Text that is not of the grammar, or has no real value."""


def evaluate(text: str, variables: Mapping[str, float] | None = None) -> Value:
    """The value of an expression.

    Args:
        text: LaTeX without its delimiters, or plain arithmetic.
        variables: values of the letters in the text, with their subscripts.

    Raises:
        MathError: the text is not of the grammar, or has no real value there.
    """
    reader = _Reader(_tokens(text), variables or {})
    try:
        value = reader.sum()
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise MathError(f"{text!r} has no value: {error}") from error
    if reader.token is not None:
        raise MathError(f"{text!r}: an operator or the end was expected at {reader.token!r}")
    if isinstance(value, complex) or value != value:
        raise MathError(f"{text!r} has no real value")
    return value


def variables(text: str) -> set[str]:
    """The names in a text that `evaluate` takes from its caller."""
    known = {*FUNCTIONS, *CONSTANTS, *ROUNDING, *FORMS} | {end for end, _ in ROUNDING.values()}
    return {t for t in _tokens(text) if t.lstrip("\\")[:1].isalpha() and t not in known}


def _tokens(text: str) -> list[str]:
    # LaTeX takes single digits for arguments without braces.
    text = re.sub(r"\\(frac|binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}", text)
    return [SYMBOLS.get(match[0], match[0]) for match in TOKEN.finditer(text)]


class _Reader:
    """Recursive descent over tokens, one method a rule of the grammar."""

    def __init__(self, tokens: list[str], variables: Mapping[str, float]) -> None:
        self._tokens, self._variables, self._at = tokens, variables, 0

    @property
    def token(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        if self.token is None:
            raise MathError("the text ends early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, token: str) -> None:
        if self.token != token:
            raise MathError(f"{token!r} was expected, not {self.token!r}")
        self._at += 1

    def sum(self) -> Value:
        value = self._product()
        while self.token in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Value:
        value = self._power()
        while self.token is not None and (self.token in ("*", "/") or self._begins_atom()):
            if self.token == "/":
                self._at += 1
                value = value / self._power()
            else:
                self._at += self.token == "*"
                value = value * self._power()
        return value

    def _begins_atom(self) -> bool:
        token = self.token or ""
        closing = {end for end, _ in ROUNDING.values()}
        return token[0].isalnum() or token in "([{" or (token[0] == "\\" and token not in closing)

    def _power(self) -> Value:
        if self.token in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            return sign * self._power()
        base = self._postfix()
        if self.token != "^":
            return base
        self._at += 1
        return _power(base, self._power())

    def _postfix(self) -> Value:
        value = self._atom()
        while self.token == "!":
            self._at += 1
            value = _factorial(value)
        return value

    def _atom(self) -> Value:
        token = self._take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return Fraction(token)
        if token in CLOSING:
            return self._closed(CLOSING[token])
        if token == "|":
            return abs(self._closed("|"))
        if token in ROUNDING:
            end, rounded = ROUNDING[token]
            return Fraction(rounded(self._closed(end)))
        if token in FORMS:
            return self._form(token)
        if token in FUNCTIONS:
            return self._function(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token in self._variables:
            return self._variables[token]
        raise MathError(f"{token!r} is no number, name or group")

    def _closed(self, end: str) -> Value:
        value = self.sum()
        self._expect(end)
        return value

    def _form(self, token: str) -> Value:
        if token == "\\sqrt":
            degree: Value = Fraction(2)
            if self.token == "[":
                self._at += 1
                degree = self._closed("]")
            return _root(self._atom(), degree)
        first, second = self._atom(), self._atom()
        if token == "\\frac":
            return first / second
        return _factorial(first) / (_factorial(second) * _factorial(first - second))

    def _function(self, token: str) -> Value:
        base, exponent = None, Fraction(1)
        if self.token == "_":
            self._at += 1
            base = self._atom()
        if self.token == "^":
            self._at += 1
            exponent = self._atom()
        value = FUNCTIONS[token](float(self._power()))
        return _power(value if base is None else value / math.log(base), exponent)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= EXACT_BITS:
            return base ** int(exponent)
    return float(base) ** float(exponent)


def _root(value: Value, degree: Value) -> float:
    if value < 0 and degree % 2 == 1:
        return -(float(-value) ** float(1 / degree))
    return float(value) ** float(1 / degree)


def _factorial(value: Value) -> Value:
    """n!, and the gamma function between the whole numbers."""
    whole = isinstance(value, Fraction) and value.denominator == 1
    if whole and 0 <= value <= EXACT_FACTORIAL:
        return Fraction(math.factorial(int(value)))
    return math.gamma(float(value) + 1)
