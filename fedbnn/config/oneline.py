"""jsonargparse's errors span many lines and speak of classes; people need one line in words."""

import re

from fedbnn.suggest import did_you_mean

LONGEST = 300
_KEY = re.compile(r'^Parser key "(?P<key>[^"]+)":\s*(?P<body>.*)$', re.DOTALL)
_REQUIRED = re.compile(r"^the following arguments are required: (?P<keys>.*)$")
_LITERAL = re.compile(
    r"^Expected a (?:typing\.)?Literal\[(?P<names>.*?)\]\. Got value: (?P<got>.*)$", re.DOTALL
)
_UNION = re.compile(r"Subtypes: \[(?P<types>.*?)\]\s+Errors:.*Given value: (?P<got>.*)$", re.DOTALL)
_PLAIN = re.compile(r"^Expected a (?P<types>.*?)\. Got value: (?P<got>.*)$", re.DOTALL)
_OPTION = re.compile(r"Option '(?P<name>[^']*)' is not accepted")


def oneline(message: str) -> str:
    """The message as `key: what is wrong`, in one line of bounded length."""
    required = _REQUIRED.match(message)
    if required:
        return f"{required['keys']} is required"
    keyed = _KEY.match(message)
    text = f"{keyed['key']}: {_reason(keyed['body'])}" if keyed else message
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _reason(body: str) -> str:
    """What is wrong with the value of a key."""
    option = _OPTION.search(body)
    if option:
        return f"unknown key {option['name']!r}"
    literal = _LITERAL.match(body)
    if literal:
        names = [name.strip(" '\"") for name in literal["names"].split(",")]
        return f"{literal['got']!r} is not one of {', '.join(names)}; {did_you_mean(literal['got'], names)}"
    typed = _UNION.search(body) or _PLAIN.match(body)
    return f"expected {_types(typed['types'])}, got {_short(typed['got'])}" if typed else body


def _types(text: str) -> str:
    """`<class 'float'>, <class 'NoneType'>` -> `float or null`."""
    text = (
        re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
        .replace("NoneType", "null")
        .replace("typing.", "")
    )
    return re.sub(r", (?![^\[]*\])", " or ", text)


def _short(text: str, most: int = 60) -> str:
    """The value as it was given, not too long."""
    if text == "None":
        return "null"
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."
