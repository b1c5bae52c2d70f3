"""Sums and differences worked out column by column, so that a small model gets them right."""

from itertools import zip_longest

COLUMNS = ("Ones", "Tens", "Hundreds")


def _digits(number: int) -> list[int]:
    """Decimal digits, ones first."""
    return [int(digit) for digit in reversed(str(number))]


def total(a: int, b: int) -> str:
    """The answer to a + b for numbers below 1,000."""
    steps, carry = [], 0
    for name, (x, y) in zip(COLUMNS, zip_longest(_digits(a), _digits(b), fillvalue=0), strict=False):
        result = x + y + carry
        steps.append(f"{name}: {x} + {y}{' + 1' if carry else ''} = {result}.")
        carry = result // 10
    return f"{' '.join(steps)} So {a} + {b} = {a + b}."


def comparison(a: int, b: int) -> str:
    """Compares two numbers digit by digit up to the first difference."""
    size = max(len(str(a)), len(str(b)))
    steps = []
    for x, y in zip(f"{a:0{size}}", f"{b:0{size}}", strict=True):
        steps.append(f"{x} {'<' if x < y else '>' if x > y else '='} {y}")
        if x != y:
            break
    return ", ".join(steps)


def difference(a: int, b: int) -> str:
    """The answer to a - b for numbers below 1,000."""
    larger, smaller = max(a, b), min(a, b)
    steps, borrowed = [f"{comparison(a, b)}{f', so {b} is larger' if a < b else ''}."], False
    for name, (x, y) in zip(COLUMNS, zip_longest(_digits(larger), _digits(smaller), fillvalue=0), strict=False):
        result = x - y - borrowed
        term = f"{x} - {y}{' - 1' if borrowed else ''}"
        borrowed = result < 0
        steps.append(f"{name}: {term}{' + 10' if borrowed else ''} = {result % 10}.")
    return f"{' '.join(steps)} So {a} - {b} = {a - b}."
