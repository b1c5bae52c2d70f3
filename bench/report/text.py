"""Formats numbers: three significant digits, thousands separators, a dash for unknown values."""


def number(value: float | None) -> str:
    """Formats a number like 0.021, 0.40, 8.13, 41.2 or 1,234; an int with all digits."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    decimals = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{decimals}f}"


def milliseconds(value: float | None) -> str:
    """Formats a time in ms with its unit; from ten seconds on in seconds."""
    if value is not None and abs(value) >= 10_000:
        return f"{number(value / 1e3)} s"
    return f"{number(value)} ms" if value is not None else "-"


def percent(share: float | None) -> str:
    """Formats a share of 1 as a percentage."""
    return "-" if share is None else f"{100 * share:.1f} %"


def interval(ci: tuple[float, float] | None) -> str:
    """Formats an interval; empty if there is none."""
    return "" if ci is None else f"{number(ci[0])}-{number(ci[1])}"


def count(amount: int, noun: str) -> str:
    """Formats an amount with its noun: 1 request, 2 requests."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
