"""The configuration: typed constructors are the sections of the YAML file and the flags of the command line.

A schema says which sections there are. What a section may hold is read off the signature of what it builds, so
there is no second list of options anywhere. Later layers win: defaults, the YAML file, the command line.
"""

from fedbnn.config.flags import Flags
from fedbnn.config.parsing import Parsed, parse, restored
from fedbnn.config.schema import Choice, Free, Named, Schema, Section, Value

__all__ = [
    "Choice",
    "Flags",
    "Free",
    "Named",
    "Parsed",
    "Schema",
    "Section",
    "Value",
    "parse",
    "restored",
]
