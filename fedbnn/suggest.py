"""Did you mean ...? The nearest known word to one that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN = 12


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Half a sentence for the end of an error: the nearest known word, or the known words, or nothing."""
    names = sorted(known)
    folded = {name.lower(): name for name in names}
    near = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    if not names:
        return ""
    return "known: " + ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
