"""Every error that a user can cause or must act on: the message names what is wrong and what to do."""

import traceback
from pathlib import Path


class FedfaError(Exception):
    """Base of all errors that fedfa raises on purpose; the command line prints them without a traceback."""


class DataError(FedfaError):
    """A data set cannot be found, read or trusted, or a partition cannot be made from it."""


class ConfigError(FedfaError):
    """A config key is unknown or misspelt, or its value is not allowed."""


class ArgumentError(FedfaError, TypeError):
    """A call names an argument that the function does not have."""


class AlgorithmError(FedfaError):
    """An algorithm names an unknown method, or combines methods that cannot be combined."""


class ModelError(FedfaError):
    """A network cannot be used: no linear classifier found, wrong output, wrong shapes."""


class ClientError(FedfaError):
    """The work of one client failed: which client, which round, at which stage.

    Args:
        client: Number of the client.
        round: Number of the round, counted from 1.
        stage: What the client was doing, e.g. ``"local training"``.
        problem: What went wrong.
    """

    def __init__(self, client: int, round: int, stage: str, problem: str) -> None:
        super().__init__(f"client {client}, round {round}, {stage}: {problem}")
        self.client, self.round, self.stage, self.problem = client, round, stage, problem

    def __reduce__(self) -> tuple[type["ClientError"], tuple[int, int, str, str]]:
        """Travel between processes whole."""
        return ClientError, (self.client, self.round, self.stage, self.problem)


class RunError(FedfaError):
    """A run directory cannot be written, resumed or read."""


class FederationError(FedfaError):
    """A federation between sites cannot start or continue: too few sites, or sites that do not match."""


def describe(error: BaseException) -> str:
    """An error in one line: fedfa's own as it is, any other with its type and the line of the user's code.

    The line is the innermost one outside fedfa's frame and of installed packages: a hook of a component, a network.
    """
    if isinstance(error, FedfaError):
        return str(error)
    package = Path(__file__).resolve().parent
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        installed = "site-packages" in file.parts or not file.exists()
        own = file.is_relative_to(package) and not file.is_relative_to(package / "algorithms")
        if not installed and not own:
            place = f" ({file.name}, line {frame.lineno}, in {frame.name})"
    return f"{type(error).__name__}: {error}{place}"
