"""Commands about data sets and their splits."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def data() -> None:
    """Find, fetch, check and look at data sets and their splits."""
