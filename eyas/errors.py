"""Errors that are the user's to mend: one sentence of what was found, one of what to do about it."""


class EyasError(Exception):
    """A fault in the input or the surroundings (exit code 1). A traceback would not help the user."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(EyasError):
    """Wrong usage: a bad flag, key or value in the config (exit code 2)."""
