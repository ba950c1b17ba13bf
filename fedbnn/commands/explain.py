"""`fedbnn explain [CODE]`: what an exit code means and what helps."""

from collections.abc import Sequence

from fedbnn.commands.arguments import Arguments
from fedbnn.explain import explain, explain_all


def main(argv: Sequence[str]) -> int:
    """Print the help text of one exit code, or of all."""
    parser = Arguments("explain", "Say what an exit code means and what helps.")
    parser.add_argument("code", type=int, nargs="?", help="the exit code; all of them when left out")
    code = parser.parse_args(argv).code
    print(explain_all() if code is None else explain(code))
    return 0
