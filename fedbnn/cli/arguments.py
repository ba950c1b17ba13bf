"""Arguments of the small commands: argparse, with errors in one line."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import NoReturn

from fedbnn.errors import ConfigError


class Arguments(ArgumentParser):
    """An ArgumentParser whose errors are ours, so they end in one line and exit code 2."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(prog=f"fedbnn {command}", description=about, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(message, self.prog, f"see {self.prog} --help")


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def words(text: str) -> list[str]:
    """Words with commas between them, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ArgumentTypeError("expected at least one word, or several with commas between them")
    return found


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them, each once."""
    found = words(text)
    if not all(word.isdecimal() for word in found):
        raise ArgumentTypeError(f"expected whole numbers with commas between them, got {text!r}")
    return [int(word) for word in found]
