"""COCO's average precision and recall of keypoints, and CrowdPose's variant of them.

Computed by faster-coco-eval, whose results equal those of pycocotools and crowdposetools. All detections are kept until
the end and sorted by the number of the image, so that the metrics do not depend on which rank evaluated which image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval.core import COCO, COCOeval_faster

from samebits.data.samples import Batch
from samebits.errors import DataError
from samebits.recipes.pose.infer import PERSON, Detections, coco_results
from samebits.recipes.pose.skeletons import Skeleton

# A metric with a slash is a detail without a column on the console.
COCO_NAMES = ("AP", "AP50", "AP75", "APM", "APL", "AR", "AR/50", "AR/75", "AR/M", "AR/L")
# CrowdPose has no metrics by the size of people, but by the crowd index of images.
CROWDPOSE_NAMES = ("AP", "AP50", "AP75", "", "", "AR", "AR/50", "AR/75")
CROWDPOSE_GROUPS = {"AP_easy": (-np.inf, 0.2), "AP_medium": (0.2, 0.8), "AP_hard": (0.8, np.inf)}
# CrowdPose has boxes but no areas. Its evaluation uses this fraction of the area of the box.
CROWDPOSE_AREA = 0.53

EvaluatedImage = Mapping[str, Any]


class PoseMetric:
    """Average precision and recall of the people found.

    The targets of a batch are one mapping per image: `image_id`, `width`, `height`, `crowd_index` (None if the dataset
    has none) and `annotations` in COCO's format.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._images: dict[int, EvaluatedImage] = {}
        self._scores: dict[str, float] = {}

    @property
    def num_samples(self) -> int:
        """The number of images, including merged ones."""
        return len(self._images)

    @property
    def images(self) -> list[EvaluatedImage]:
        """All images, sorted by number: `target`, `index` in the dataset and `results`."""
        return [self._images[number] for number in sorted(self._images)]

    def add(self, outputs: Sequence[Detections], batch: Batch) -> None:
        """Add the detections of a batch. Raises DataError if two images of the dataset have the same number."""
        for found, target, index in zip(
            outputs, batch.targets, batch.indices.tolist(), strict=True
        ):
            number = int(target["image_id"])
            self._keep(
                number,
                {
                    "target": target,
                    "index": index,
                    "results": coco_results(found, number),
                },
            )

    def state(self) -> dict[str, Any]:
        """Return all images as plain values."""
        return {"images": self.images}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another rank."""
        for image in state["images"]:
            self._keep(int(image["target"]["image_id"]), image)

    def result(self) -> dict[str, float]:
        """Compute the metrics: AP, AP50, AP75, AR, AR/50, AR/75; COCO also by size, CrowdPose by crowd index.

        A metric is -1 if there are no people to find, as in COCO's own evaluation.
        """
        images = self.images
        self._scores = keypoint_scores(
            [image["target"] for image in images],
            [result for image in images for result in image["results"]],
            self.skeleton,
        )
        return self._scores

    def warnings(self) -> list[str]:
        """Return a sentence if no person was found."""
        num_people = sum(len(image["target"]["annotations"]) for image in self.images)
        if self._scores.get("AP50") != 0 or not num_people:
            return []
        return [f"none of {num_people:,} people is found: AP50 is 0"]

    def _keep(self, number: int, image: EvaluatedImage) -> None:
        if number in self._images:
            raise DataError(
                f"image {number} was evaluated twice", where=str(image["target"].get("file_name", "")) or None,
                fix="Give each image of the annotation file a unique id.",
            )  # fmt: skip
        self._images[number] = image


def keypoint_scores(
    targets: Sequence[EvaluatedImage], results: Sequence[Mapping[str, Any]], skeleton: Skeleton
) -> dict[str, float]:
    """Compute the metrics of predictions against the ground truth.

    Args:
        targets: One mapping per image; `PoseMetric` describes it.
        results: Detections in COCO's results format.

    Returns:
        Metrics by name.
    """
    whole = run_evaluation(targets, results, skeleton)
    if skeleton.name != "crowdpose":
        return dict(zip(COCO_NAMES, whole.stats.tolist(), strict=True))
    metrics = {
        name: value
        for name, value in zip(CROWDPOSE_NAMES, whole.stats.tolist(), strict=False)
        if name
    }
    if any(target.get("crowd_index") is not None for target in targets):
        for name, (low, high) in CROWDPOSE_GROUPS.items():
            group = [
                target for target in targets if low <= (target.get("crowd_index") or 0.0) < high
            ]
            metrics[name] = -1.0
            if group:
                precision = run_evaluation(group, results, skeleton).eval["precision"]
                # CrowdPose's score is the mean of all precisions, with -1 for undefined ones, to 4 digits.
                metrics[name] = round(float(np.mean(precision[:, :, :, 0, :])), 4)
    return metrics


def run_evaluation(
    targets: Sequence[EvaluatedImage],
    results: Sequence[Mapping[str, Any]],
    skeleton: Skeleton,
) -> COCOeval_faster:
    """Run the evaluation of faster-coco-eval: `stats`, `eval["precision"]`, `ious`.

    Args:
        targets: One mapping per image; `PoseMetric` describes it.
        results: Detections in COCO's results format. Those of other images are ignored.
    """
    people = [
        {**person, "image_id": int(t["image_id"])} for t in targets for person in t["annotations"]
    ]
    if skeleton.name == "crowdpose":
        people = [
            {**person, "area": person["bbox"][2] * person["bbox"][3] * CROWDPOSE_AREA}
            for person in people
        ]
    numbers = {int(target["image_id"]) for target in targets}
    found = [
        {**result, "area": result["bbox"][2] * result["bbox"][3]}
        for result in results
        if result["image_id"] in numbers
    ]
    for entries in (people, found):
        # New ids: in the library, 0 means "no match", and a file may use an id twice.
        for number, entry in enumerate(entries, start=1):
            entry["id"] = number
    images = [{"id": number} for number in sorted(numbers)]
    categories = [{"id": PERSON, "name": "person"}]
    truth, guesses = (
        COCO({"images": images, "annotations": entries, "categories": categories})
        for entries in (people, found)
    )
    evaluation = COCOeval_faster(
        truth,
        guesses,
        "keypoints",
        kpt_oks_sigmas=list(skeleton.sigmas),
        print_function=lambda *_: None,
    )
    evaluation.params.catIds = [PERSON]
    evaluation.run()
    return evaluation
