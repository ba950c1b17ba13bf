"""Settings as a configuration file or the command line gives them: parsed and range-checked."""

from typing import Any

from jsonargparse import ArgumentParser


def parsed(section: type, **setting: str) -> Any:
    """What the text of one setting of this section becomes; raises jsonargparse's ArgumentError."""
    ((name, text),) = setting.items()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(section, "section")
    return parser.parse_args([f"--section.{name}={text}"]).section[name]
