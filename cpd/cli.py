"""The `cpd` command. Imports the rest only when a subcommand needs it."""

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def cpd() -> None:
    """Serve large language models from a cluster of prefill workers and combined nodes."""


def main() -> None:
    """Entry point of the console script."""
    app()
