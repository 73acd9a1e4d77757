"""How good the people found are: COCO's average precision and recall of keypoints, and CrowdPose's variant of them.

Computed by faster-coco-eval, whose statistics equal pycocotools' and crowdposetools'. All that was found is kept until
the end and put in the order of the images' numbers, so the figures do not depend on who evaluated which image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval.core import COCO, COCOeval_faster

from lockstep.data.samples import Batch
from lockstep.errors import DataError
from lockstep.recipes.pose.infer import PERSON, Detections, coco_results
from lockstep.recipes.pose.skeletons import Skeleton

# A slash means a detail, which has no column on the console.
COCO_NAMES = ("AP", "AP50", "AP75", "APM", "APL", "AR", "AR/50", "AR/75", "AR/M", "AR/L")
# CrowdPose leaves out sizes, and asks instead how crowded an image is.
CROWDPOSE_NAMES = ("AP", "AP50", "AP75", "", "", "AR", "AR/50", "AR/75")
CROWDPOSE_GROUPS = {"AP_easy": (-np.inf, 0.2), "AP_medium": (0.2, 0.8), "AP_hard": (0.8, np.inf)}
# CrowdPose gives boxes, no areas; its evaluation takes this share of a box for the person's.
CROWDPOSE_AREA = 0.53

Picture = Mapping[str, Any]


class PoseMetric:
    """Average precision and recall of the people found.

    A batch's targets are one mapping for each image: `image_id`, `width`, `height`, `crowd_index` (None where the
    dataset has none) and `annotations` in COCO's form.

    Args:
        skeleton: Whose joints; with CrowdPose's its own rules hold.
        num_sketches: Of so many images, the first, small heatmaps are kept for drawings.
    """

    def __init__(self, skeleton: Skeleton, num_sketches: int = 8) -> None:
        self.skeleton = skeleton
        self._num_sketches = num_sketches
        self._pictures: dict[int, Picture] = {}

    @property
    def num_samples(self) -> int:
        """How many images were added, here or in what was merged."""
        return len(self._pictures)

    @property
    def pictures(self) -> list[Picture]:
        """All images by number: `target`, `index` (place in the dataset), `results` and `sketch` (or None)."""
        return [self._pictures[number] for number in sorted(self._pictures)]

    def add(self, outputs: Sequence[Detections], batch: Batch) -> None:
        """Take in what was found in a batch of images.

        Raises:
            DataError: Two images of the dataset have one number.
        """
        for found, target, index in zip(outputs, batch.targets, batch.indices.tolist(), strict=True):
            number = int(target["image_id"])
            self._keep(
                number,
                {
                    "target": target,
                    "index": index,
                    "results": coco_results(found, number),
                    "sketch": found.heat.tolist() if index < self._num_sketches else None,
                },
            )

    def state(self) -> dict[str, Any]:
        """All images seen, as plain values."""
        return {"pictures": self.pictures}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images that another rank has seen."""
        for picture in state["pictures"]:
            self._keep(int(picture["target"]["image_id"]), picture)

    def result(self) -> dict[str, float]:
        """COCO: AP, AP50, AP75, APM, APL, AR and so on; CrowdPose: AP_easy, AP_medium, AP_hard instead of the sizes.

        A figure is -1 where there is nobody to find, as in COCO's own evaluation.
        """
        pictures = self.pictures
        return keypoint_scores(
            [picture["target"] for picture in pictures],
            [result for picture in pictures for result in picture["results"]],
            self.skeleton,
        )

    def _keep(self, number: int, picture: Picture) -> None:
        if number in self._pictures:
            raise DataError(
                f"image {number} was evaluated twice", where=str(picture["target"].get("file_name", "")) or None,
                fix="give each image of the annotation file an id of its own",
            )  # fmt: skip
        self._pictures[number] = picture


def keypoint_scores(
    targets: Sequence[Picture], results: Sequence[Mapping[str, Any]], skeleton: Skeleton
) -> dict[str, float]:
    """Compare what was found with what is there.

    Args:
        targets: One mapping for each image, as `PoseMetric` describes it.
        results: What was found, in COCO's form.
        skeleton: Whose joints.

    Returns:
        The figures by name.
    """
    whole = run_evaluation(targets, results, skeleton)
    if skeleton.name != "crowdpose":
        return dict(zip(COCO_NAMES, whole.stats.tolist(), strict=True))
    figures = {name: value for name, value in zip(CROWDPOSE_NAMES, whole.stats.tolist(), strict=False) if name}
    if any(target.get("crowd_index") is not None for target in targets):
        for name, (low, high) in CROWDPOSE_GROUPS.items():
            group = [target for target in targets if low <= (target.get("crowd_index") or 0.0) < high]
            figures[name] = _crowd_score(run_evaluation(group, results, skeleton, whole.ious)) if group else -1.0
    return figures


def run_evaluation(
    targets: Sequence[Picture],
    results: Sequence[Mapping[str, Any]],
    skeleton: Skeleton,
    known: Mapping[Any, Any] | None = None,
) -> COCOeval_faster:
    """The library's evaluation of these images, done: `stats`, `eval["precision"]`, `ious`.

    Args:
        targets: One mapping for each image, as `PoseMetric` describes it.
        results: What was found, in COCO's form; what was found in other images is left out.
        skeleton: Whose joints.
        known: The `ious` of an evaluation of more images, to take them from there.
    """
    people = [{**person, "image_id": int(t["image_id"])} for t in targets for person in t["annotations"]]
    if skeleton.name == "crowdpose":
        people = [{**person, "area": person["bbox"][2] * person["bbox"][3] * CROWDPOSE_AREA} for person in people]
    numbers = {int(target["image_id"]) for target in targets}
    found = [
        {**result, "area": result["bbox"][2] * result["bbox"][3]} for result in results if result["image_id"] in numbers
    ]
    for entries in (people, found):
        # Numbers of our own: the library takes 0 for "nobody", and a file may use one number twice.
        for place, entry in enumerate(entries, start=1):
            entry["id"] = place
    images, categories = [{"id": number} for number in sorted(numbers)], [{"id": PERSON, "name": "person"}]
    truth, guesses = (
        COCO({"images": images, "annotations": entries, "categories": categories}) for entries in (people, found)
    )
    evaluation = _Evaluation(truth, guesses, skeleton, known)
    evaluation.run()
    return evaluation


class _Evaluation(COCOeval_faster):  # type: ignore[misc]  # the library has no types
    """The library's, silent; and what is known of who resembles whom is not computed again."""

    def __init__(self, truth: COCO, guesses: COCO, skeleton: Skeleton, known: Mapping[Any, Any] | None) -> None:
        sigmas = list(skeleton.sigmas)
        super().__init__(truth, guesses, "keypoints", kpt_oks_sigmas=sigmas, print_function=lambda *_: None)
        self.params.catIds = [PERSON]
        self._known = known

    def computeOks(self, imgId: int, catId: int) -> Any:
        """(people found, people) similarities of an image."""
        return super().computeOks(imgId, catId) if self._known is None else self._known[imgId, catId]


def _crowd_score(evaluation: COCOeval_faster) -> float:
    """CrowdPose's figure for a group: all precisions' mean, with -1 for each that there is none of, to 4 digits."""
    return round(float(np.mean(evaluation.eval["precision"][:, :, :, 0, :])), 4)
