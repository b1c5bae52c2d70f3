"""Sums and differences, worked out column by column as at school: so a small model gets them right."""

from itertools import zip_longest

COLUMNS = ("Ones", "Tens", "Hundreds")


def _digits(number: int) -> list[int]:
    """Decimal digits, ones first."""
    return [int(digit) for digit in reversed(str(number))]


def total(a: int, b: int) -> str:
    """The answer to a + b, of numbers below 1,000."""
    steps, carry = [], 0
    for name, (x, y) in zip(COLUMNS, zip_longest(_digits(a), _digits(b), fillvalue=0), strict=False):
        result = x + y + carry
        steps.append(f"{name}: {x} + {y}{' + 1' if carry else ''} = {result}.")
        carry = result // 10
    return f"{' '.join(steps)} So {a} + {b} = {a + b}."


def difference(a: int, b: int) -> str:
    """The answer to a - b, of numbers below 1,000."""
    larger, smaller = max(a, b), min(a, b)
    steps, borrowed = [], 0
    for name, (x, y) in zip(COLUMNS, zip_longest(_digits(larger), _digits(smaller), fillvalue=0), strict=False):
        top = x - borrowed
        borrowed = int(top < y)
        top += 10 * borrowed
        steps.append(f"{name}: {top} - {y} = {top - y}.")
    if a < b:
        steps.insert(0, f"{b} is larger.")
    return f"{' '.join(steps)} So {a} - {b} = {a - b}."
