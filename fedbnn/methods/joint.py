"""Joint training: all data so far in one place, the upper bound.

    each round  one virtual client takes N images, drawn from everything participants were given in rounds 1..r, and
                min_theta  CE(theta; these images)
    state       none;  floats per weight: 1 down, 1 up for one client (the images it would have to be sent are not counted)

N is the number of images that the participants of the round hold, so its budget is that of the whole federation.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedbnn.federation.joint_stream import JointStream
from fedbnn.methods.base import Method
from fedbnn.stream import Stream


@dataclass(frozen=True)
class Joint(Method):
    """Central training on all data so far, with the budget of the federation."""

    formula: ClassVar[str] = "theta = argmin CE(theta; D_1, ..., D_r in one place)"

    def stream(self, stream: Stream) -> Stream:
        """One virtual client with the pooled images."""
        return JointStream(stream)

    def facts(self) -> dict[str, Any]:
        """That this is no federation."""
        return {"bound": "upper: all images so far in one place"}
