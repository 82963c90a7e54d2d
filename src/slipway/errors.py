"""Errors for people: what went wrong, where, and what to do next."""


class SlipwayError(Exception):
    """A failure somebody can act on. The message is shown as it stands; the process exits with `exit_code`."""

    exit_code = 1


class UsageError(SlipwayError):
    """The command was called wrongly: an unknown option, a value of the wrong type, a path that is not there."""

    exit_code = 2
