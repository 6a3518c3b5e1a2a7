"""Every error that a user can cause or must act on: the message names what is wrong and what to do."""


class FedfaError(Exception):
    """Base of all errors that fedfa raises on purpose; the command line prints them without a traceback."""


class DataError(FedfaError):
    """A data set cannot be found, read or trusted, or a partition cannot be made from it."""


class SettingsError(FedfaError):
    """A setting is unknown, misspelt or has a value that is not allowed."""


class RecipeError(FedfaError):
    """A recipe names an unknown method, or combines methods that do not fit together."""


class ModelError(FedfaError):
    """A network cannot be used: no linear classifier found, wrong output, wrong shapes."""


class ClientError(FedfaError):
    """The work of one client failed; says which client, which round and at what stage.

    Args:
        client: Number of the client.
        round: Number of the round, counted from 1.
        stage: What the client was doing, e.g. ``"local training"``.
        problem: What went wrong, in words.
    """

    def __init__(self, client: int, round: int, stage: str, problem: str) -> None:
        super().__init__(f"client {client}, round {round}, {stage}: {problem}")
        self.client, self.round, self.stage, self.problem = client, round, stage, problem

    def __reduce__(self) -> tuple[type["ClientError"], tuple[int, int, str, str]]:
        """Travel between processes whole."""
        return ClientError, (self.client, self.round, self.stage, self.problem)


class RunError(FedfaError):
    """A run folder cannot be written, resumed or read."""


class FederationError(FedfaError):
    """A federation between sites cannot begin or go on: too few sites, or sites that do not fit together."""
