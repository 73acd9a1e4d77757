"""The joints of the datasets: COCO's 17 and CrowdPose's 14.

Legend: K joints. Numbers are indices in the order of the dataset, from 0.
"""

from dataclasses import dataclass
from functools import cached_property

# Standard deviation of human annotations of a joint, relative to the size of the person: the constants of COCO's
# evaluation of keypoints. CrowdPose's evaluation uses 0.079 for the head and the neck.
_SPREAD = {
    "nose": 0.026, "eye": 0.025, "ear": 0.035, "shoulder": 0.079, "elbow": 0.072, "wrist": 0.062, "hip": 0.107,
    "knee": 0.087, "ankle": 0.089, "head": 0.079, "neck": 0.079,
}  # fmt: skip


@dataclass(frozen=True)
class Skeleton:
    """The joints of a dataset."""

    name: str  #: "coco" or "crowdpose".
    joints: tuple[str, ...]  #: K names, in the order of the annotation files.
    limbs: tuple[tuple[int, int], ...]  #: Pairs of joints that pictures connect.
    #: Joints in the order in which they are grouped into people, the most reliable first.
    order: tuple[int, ...]

    @property
    def num_joints(self) -> int:
        """K."""
        return len(self.joints)

    @cached_property
    def mirrored(self) -> tuple[int, ...]:
        """For each joint, its partner in a mirrored image: left_knee for right_knee, nose for nose."""
        swap = {"left": "right", "right": "left"}
        names = [
            f"{swap[side]}_{rest}" if rest and side in swap else joint
            for joint in self.joints
            for side, _, rest in [joint.partition("_")]
        ]
        return tuple(self.joints.index(name) for name in names)

    @cached_property
    def sigmas(self) -> tuple[float, ...]:
        """For each joint, its constant in object keypoint similarity (OKS)."""
        return tuple(_SPREAD[joint.rpartition("_")[2]] for joint in self.joints)


def _limbs(joints: tuple[str, ...], *names: str) -> tuple[tuple[int, int], ...]:
    pairs = [name.split("-") for name in names]
    return tuple((joints.index(first), joints.index(second)) for first, second in pairs)


_COCO = (
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
)  # fmt: skip
_CROWDPOSE = (*_COCO[5:], "head", "neck")
_BODY = (
    "left_shoulder-right_shoulder", "left_shoulder-left_elbow", "left_elbow-left_wrist", "right_shoulder-right_elbow",
    "right_elbow-right_wrist", "left_shoulder-left_hip", "right_shoulder-right_hip", "left_hip-right_hip",
    "left_hip-left_knee", "left_knee-left_ankle", "right_hip-right_knee", "right_knee-right_ankle",
)  # fmt: skip
_FACE = (
    "left_eye-right_eye", "nose-left_eye", "nose-right_eye", "left_eye-left_ear", "right_eye-right_ear",
    "left_ear-left_shoulder", "right_ear-right_shoulder",
)  # fmt: skip

COCO = Skeleton(
    name="coco",
    joints=_COCO,
    limbs=_limbs(_COCO, *_FACE, *_BODY),
    order=(0, 1, 2, 3, 4, 5, 6, 11, 12, 7, 8, 9, 10, 13, 14, 15, 16),
)
# As in the reference implementation, the first 14 numbers of COCO's order, although they are other joints here: another
# order would group crowded images differently.
CROWDPOSE = Skeleton(
    name="crowdpose",
    joints=_CROWDPOSE,
    limbs=_limbs(_CROWDPOSE, "head-neck", *_BODY),
    order=COCO.order[:14],
)

SKELETONS = {skeleton.name: skeleton for skeleton in (COCO, CROWDPOSE)}
