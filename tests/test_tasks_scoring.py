"""Scores of end tasks: right answers count in any spelling, wrong ones in none."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.evals.latex_math import MathError, evaluate, variables
from dasc_jax.evals.scoring import (
    boxed,
    choice_letter,
    final_answer,
    locomo_score,
    same_answer,
    token_f1,
)

WHOLE = st.integers(-(10**12), 10**12)


@given(WHOLE, WHOLE.filter(bool), st.integers(0, 12))
def test_arithmetic_on_fractions_is_exact(a, b, n):
    value = Fraction(a, b)
    assert evaluate(rf"\frac{{{a}}}{{{b}}}") == value
    assert evaluate(f"({a})^{{{n}}} / ({b}) - 1") == Fraction(a**n, b) - 1
    assert same_answer(str(a), f"$\\boxed{{{a}}}$".replace("\\boxed", ""))
    assert not same_answer(str(a), str(a + 1))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac12+\frac{1}{2}", 1),
        (r"2\sqrt[3]{8}", 4),
        (r"\sqrt[3]{-8}", -2),
        (r"\lfloor 7/2 \rfloor \cdot 2", 6),
        (r"\binom{10}{3}", 120),
        (r"5!", 120),
        (r"-2^2", -4),
        (r"|2-5|", 3),
        (r"\log_{2} 8", 3),
        (r"\sin^2(\pi/6)", 0.25),
        (r"2\pi r", 4 * math.pi),
        (r"a_1 a_{12}", 15),
        (".5", Fraction(1, 2)),
        (r"2^{-1}", Fraction(1, 2)),
    ],
)
def test_expressions_have_their_value(text, value):
    assert evaluate(text, {"r": 2.0, "a_1": 3.0, "a_{12}": 5.0}) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "1+", "(1", "1)", "x", "1/0", r"\sqrt{-1}", "9^{9^{9}}", r"\foo", "(" * 10_000, "1 = 1"]
    + [r"\sqrt[0]{2}", "(-2)!", r"\ln 0", "{"],
)
def test_what_has_no_value_is_an_error(text):
    with pytest.raises(MathError):
        evaluate(text)


@given(st.text(alphabet=r"0123456789xy+-*/^!()[]{}|\, fracsqtlobinmpe", max_size=40))
def test_no_text_does_worse_than_a_math_error(text):
    try:
        evaluate(text, dict.fromkeys(variables(text), 2.5))
    except MathError:
        pass
    assert same_answer(text, text)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "042"),
        ("3", "3.0"),
        ("4151879777", "4{,}151{,}879{,}777"),
        ("4151879777", "4,151,879,777"),
        (r"$-\frac{2}{3},0,\frac{2}{3}$", r"0, 2/3, -2/3"),
        (
            r"$(-\infty,0)\cup\{\frac{1}{2}\}$",
            r"\left\{\tfrac12\right\} \cup \left(-\infty, 0\right)",
        ),
        ("$P(x)=-1, P(x)=x+1$", r"P(x)=x+1 \text{ and } P(x)=-1"),
        ("$2^{u-2}$", r"\dfrac{2^u}{4}"),
        (r"$\left\lfloor \log_{2}a\right\rfloor +1$.", r"1+\lfloor \log_2 a\rfloor"),
        (r"$2025^2 a(a-1)$ ", "2025^2(a^2-a)"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3/4}"),
        (r"\{1,2\}", "2, 1"),
        ("(4, 1, 2)", "(4,1,2)"),
        (r"90^\circ", "90"),
        ("no such $n$", "no such n"),
    ],
)
def test_equal_answers_are_equal(reference, answer):
    assert same_answer(reference, answer) and same_answer(answer, reference)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("4151879777", "4151879778"),
        ("2026, 2030", "2030"),
        ("1, 2", "1, 2, 2"),
        ("(1,2)", "(2,1)"),
        ("(0,1)", "[0,1)"),
        ("x+1", "n+1"),
        ("x+1", "x+2"),
        ("5", ""),
        ("5", r"\text{five}"),
        ("0", r"\frac{1}{1000000}"),
        (r"\pi", "3.14159"),
    ],
)
def test_other_answers_are_not(reference, answer):
    assert not same_answer(reference, answer) and not same_answer(answer, reference)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("First I thought the answer is (A). The answer is **B**", "B"),
        ("Answer: D", "D"),
        (r"so \boxed{\text{A}}; not (B)", "A"),
        (r"$\boxed{C}$", "C"),
        ("It must be (D), clearly", "D"),
        ("<think>The answer is (A)</think> The answer is (B)", "B"),
        ("the answer is a bit unclear", None),
        ("The answer is (E).", None),
        ("", None),
    ],
)
def test_the_last_letter_that_is_called_the_answer_counts(text, letter):
    assert choice_letter(text, 4) == letter


def test_ten_options_reach_to_j():
    assert choice_letter("The answer is (J).", 10) == "J"


@given(st.recursive(st.just("x"), lambda inner: inner.map(lambda s: f"{{{s}}}"), max_leaves=5))
def test_a_box_holds_whatever_braces_balance(inner):
    assert boxed(f"first \\boxed{{0}}, then \\boxed{{{inner}}} done") == inner


def test_final_answers_are_boxed_and_an_integer_need_not_be():
    assert final_answer(r"\boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert final_answer("It is 7.") is None
    assert final_answer("Of 12 there are 1,024.", integer=True) == "1024"
    assert final_answer("<think>5</think>none", integer=True) is None
    assert final_answer("about 3.5", integer=True) is None


def test_token_f1_is_of_bags_of_words():
    assert token_f1("The 7 May 2023", "7 May, 2023!") == 1.0
    assert token_f1("a red car", "red") == pytest.approx(2 / 3)
    assert token_f1("red red", "red blue") == pytest.approx(0.5)
    assert token_f1("red", "blue") == token_f1("", "x") == token_f1("x", "") == 0.0


@given(
    st.lists(st.sampled_from("red green blue".split())),
    st.lists(st.sampled_from("red tan".split())),
)
def test_token_f1_is_symmetric_and_bounded(left, right):
    value = token_f1(" ".join(left), " ".join(right))
    assert value == token_f1(" ".join(right), " ".join(left)) and 0 <= value <= 1


def test_locomo_categories_differ():
    assert locomo_score("pottery, camping", "camping and swimming, pottery", 1) == pytest.approx(
        5 / 6
    )
    assert locomo_score("yes; she likes it", "Yes", 3) == 1.0
    assert locomo_score("yes; she likes it", "Yes", 4) == pytest.approx(0.4)
    assert locomo_score("", "That is not mentioned.", 5) == 1.0
    assert locomo_score("", "A dog", 5) == 0.0
