"""Faults of an annotation file with two images, 1 and 2, and the expected errors."""

from collections.abc import Callable
from typing import Any

from samebits.recipes.pose.skeletons import CROWDPOSE

Change = Callable[[dict[str, Any]], Any]


def at(place: str, value: Any = None, **values: Any) -> Change:
    """Set a value at a place, such as annotations.0.bbox, or values of the mapping that is there."""

    def change(content: Any) -> None:
        *way, last = [int(word) if word.isdigit() else word for word in place.split(".")]
        for word in way:
            content = content[word]
        if values:
            content[last].update(values)
        else:
            content[last] = value

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "no annotations": (lambda c: c.pop("annotations"), r"no list of annotations"),
    "annotations of another kind": (at("annotations", [1]), r"annotations\[0\] of .* is 1\n"),
    "other joints": (at("categories.0.keypoints", list(CROWDPOSE.joints)), r"other joints(.|\n)*data\.name=crowdpose"),
    "no people": (at("categories.0.name", "dog"), r"no category person(.|\n)*dog"),
    "too few numbers": (
        at("annotations.1.keypoints", [1, 2, 2]), r"keypoints of annotation \d+ is \[1, 2, 2\](.|\n)*at least 51 items",
    ),
    "a number that is none": (
        at("annotations.0.keypoints.3", "x"),
        r"keypoints\[3\] of annotation 100 is \"x\"\n(.|\n)*annotations\[0\]\.keypoints\[3\]\n",
    ),
    "a text of a number": (at("annotations.0.keypoints.50", "2"), r"keypoints\[50\] of annotation 100 is \"2\"\n"),
    "not finite": (
        at("annotations.0.bbox.2", float("inf")),
        r"bbox\[2\] of annotation 100 is Infinity(.|\n)*annotations\[0\]\.bbox\[2\]\n",
    ),
    "a number that no float holds": (at("annotations.0.bbox.0", -(10**400)), r"bbox\[0\] of annotation 100 is -1000"),
    "a number whose square no float holds": (
        at("annotations.0.keypoints.1", 1e300),
        r"keypoints\[1\] of annotation 100 is 1e\+300(.|\n)*less than or equal to 1000000000",
    ),
    "lists for numbers": (
        lambda c: [entry.update(bbox=[[1, 2]] * 4) for entry in c["annotations"]],
        r"bbox\[0\] of annotation 100 is \[1, 2\]",
    ),
    "an enormous area": (at("annotations.1.area", 10**400), r"area of annotation \d+ is 1000"),
    "a box of less than nothing": (
        at("annotations.1.bbox", [3, 4, 5, -6]),
        r"bbox\[3\] of annotation 101 is -6\n(.|\n)*greater than or equal to 0",
    ),
    "an area below nothing": (at("annotations.0.area", -1), r"area of annotation 100 is -1\n"),
    "an area in some": (lambda c: c["annotations"][0].pop("area"), r"annotation 100 has no area"),
    "no areas": (lambda c: [entry.pop("area") for entry in c["annotations"]], r"no annotation of split val2017 has an"),
    "a crowd index that is no number": (at("images.1.crowdIndex", "0.5"), r"crowdIndex of image 2 is \"0\.5\""),
    "a category that isn't there": (
        at("annotations.0.category_id", 0),
        r"category_id of annotation 100 is 0(.|\n)*id of one of the file's categories",
    ),
    "no joints, as it says": (
        at("annotations.0.num_keypoints", 0), r"num_keypoints of annotation 100 is 0(.|\n)*allowed  \d+, as many",
    ),
    "joints, as it says": (
        at("annotations.0", num_keypoints=3, keypoints=[0] * 51),
        r"num_keypoints of annotation 100 is 3(.|\n)*allowed  0, as many",
    ),
    "more joints than there are": (
        at("annotations.0.num_keypoints", 18), r"num_keypoints of annotation 100 is 18(.|\n)*less than or equal to 17",
    ),
    "after entries of another kind": (
        lambda c: (
            c["categories"].append({"id": 2, "name": "dog"}),
            c["annotations"].insert(0, {"id": 1, "category_id": 2}),
            c["annotations"][1].update(iscrowd=2),
        ),
        r"iscrowd of annotation 100 is 2(.|\n)*annotations\[1\]\.iscrowd",
    ),
    "no field": (lambda c: c["annotations"][0].pop("num_keypoints"), r"annotation 100 has no num_keypoints"),
    "an owner that isn't there": (
        at("annotations.0.image_id", 77), r"image_id of annotation 100 is 77(.|\n)*id of one of",
    ),
    "a list for an owner": (at("annotations.0.image_id", [1]), r"image_id of annotation 100 is \[1\]"),
    "two of one number": (at("images.1.id", 1), r"id 1 comes twice in images(.|\n)*images\[0\] and images\[1\]"),
    "a size of nothing": (at("images.1.width", 0), r"width of image 2 is 0(.|\n)*images\[1\]\.width"),
    "an enormous side": (
        at("images.0.width", 10**400), r"width of image 1 is 1000.{,60}\n(.|\n)*less than or equal to 178956970",
    ),
    "an enormous picture": (at("images.0", width=10**6, height=10**6), r"image 1 is 1000000x1000000"),
    "a way out of the folder": (at("images.0.file_name", "../../etc/passwd"), r"file_name of image 1 is"),
    "an absolute name": (at("images.0.file_name", "/etc/passwd"), r"file_name of image 1 is"),
    "a picture that is missing": (at("images.0.file_name", "gone.jpg"), r"1 of 2 images are missing(.|\n)*gone\.jpg"),
    "a broken region": (
        at("annotations.0", iscrowd=1, segmentation=[[1, 2]]), r"segmentation of annotation 100 is \[\[1, 2\]\]",
    ),
    "an outline of no numbers": (
        at("annotations.0", iscrowd=1, segmentation=[[1, 2, float("nan"), 2, 5, 5]]),
        r"segmentation of annotation 100 is \[\[1, 2, NaN(.|\n)*annotations\[0\]\.segmentation(.|\n)*finite",
    ),
    "enormous run lengths": (
        at("annotations.0", iscrowd=1, segmentation={"size": [64, 64], "counts": [10**30]}),
        r"segmentation of annotation 100 is \{",
    ),
    "an enormous number of keypoints": (
        at("annotations.0.num_keypoints", 10**30), r"num_keypoints of annotation 100 is 1000",
    ),
    "an enormous id": (at("annotations.0.id", 10**30), r"id of annotation number 0 is 1000"),
    "joints that are no list": (at("categories.0.keypoints", 5), r"has other joints than coco(.|\n)*given  +5\n"),
}  # fmt: skip
