"""Arguments of the small commands: argparse, with errors in one line."""

from argparse import ArgumentParser
from typing import NoReturn

from fedbnn.errors import ConfigError


class Arguments(ArgumentParser):
    """An ArgumentParser whose errors are ours, so they end in one line and exit code 2."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(prog=f"fedbnn {command}", description=about, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(message, self.prog, f"see {self.prog} --help")
