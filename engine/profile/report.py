"""Prints the results of `cpd profile` and its subcommands."""

from rich import box
from rich.console import Console
from rich.table import Table

from cpd.performance.model import PerfModel, Profile, Work
from engine.profile.budget import BudgetSweep
from engine.profile.splits import SplitTable

DOUBTFUL = 0.25
"""95th percentile of relative errors above which the device was probably busy."""

SHOWN = (
    *((f"decode, {seqs} x 1,024 tokens", Work.decode(seqs, seqs * 1024)) for seqs in (1, 8, 32, 128)),
    *((f"prefill, {tokens:,} tokens", Work.prefill(tokens)) for tokens in (128, 512, 2048)),
    ("prefill, 512 tokens after 4,096", Work.prefill(512, 4096)),
    ("prefill 512 + decode 32 x 1,024", Work.decode(32, 32 * 1024) + Work.prefill(512)),
)
"""Steps whose predictions are shown."""


def show_profile(profile: Profile, console: Console) -> None:
    """Prints a profile's source, accuracy and predictions."""
    console.print(f"{profile.model} on {profile.device}: {profile.source}", highlight=False)
    if profile.error:
        console.print(
            f"Error on steps it was not fitted to ({profile.error.samples} measured): median "
            f"{profile.error.median:.1%}, 95th percentile {profile.error.p95:.1%}",
            highlight=False,
        )
    if profile.error and profile.error.p95 > DOUBTFUL:
        console.print("That is high: measure again when nothing else runs on the device.", style="yellow")
    if profile.source == "roofline":
        console.print("Computed from a roofline, not measured on this device.", style="yellow")
    model = PerfModel(profile)
    table = _table("ms a step", *(_share(profile, part.share) for part in profile.shares))
    for name, work in SHOWN:
        table.add_row(name, *(_ms(model.step_ms(work, part.share)) for part in profile.shares))
    if any(part.share < 1 for part in profile.shares):
        table.add_section()
        table.add_row("decode during a prefill", *(f"x {part.decode.slowdown:.2f}" for part in profile.shares[:-1]), "")
        table.add_row("prefill during decodes", *(f"x {part.prefill.slowdown:.2f}" for part in profile.shares[:-1]), "")
    console.print(table)


def show_budget(sweep: BudgetSweep, console: Console) -> None:
    """Prints the Pareto curve of token budgets, with its knee."""
    console.print(
        f"A prompt of {sweep.prompt:,} tokens with {sweep.decodes} decodes of {sweep.context:,} tokens; a decode step "
        f"alone takes {_ms(sweep.decode_ms)} ms.",
        highlight=False,
    )
    table = _table("token budget", "prefill, ms", "longest step, ms", "decode slowdown", "")
    for point in sweep.points:
        knee = "the knee" if point == sweep.knee else ""
        row = (f"{point.token_budget:,}", _ms(point.prefill_ms), _ms(point.step_ms), f"x {point.slowdown:.2f}", knee)
        table.add_row(*row, style="bold" if knee else None)
    console.print(table)
    console.print(f"Choose --token-budget {sweep.knee.token_budget}.", highlight=False)


def show_splits(found: SplitTable, console: Console) -> None:
    """Prints every split for one load, and the choice."""
    prefill_ms, decode_ms = found.alone_ms
    console.print(
        f"Undisturbed on the whole device: prefill {_ms(prefill_ms)} ms, decode step {_ms(decode_ms)} ms. "
        f"Target of the decode step: {_ms(found.target_ms)} ms.",
        highlight=False,
    )
    table = _table("prefill + decode units", "prefill, ms", "decode step, ms", "keeps target", "prepared", "")
    for row in found.rows:
        chosen = row.split == found.choice
        table.add_row(
            f"{row.split.prefill} + {row.split.decode}",
            _ms(row.prefill_ms),
            _ms(row.decode_ms),
            "yes" if row.keeps_target else "no",
            "yes" if row.prepared else "",
            "the choice" if chosen else "",
            style="bold" if chosen else None,
        )
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _share(profile: Profile, share: float) -> str:
    return f"{round(share * profile.units)} of {profile.units}" if profile.units > 1 else f"{share:.0%}"


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
