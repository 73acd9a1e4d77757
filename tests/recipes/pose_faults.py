"""Faults of an annotation file with two images, 1 and 2, and the expected errors."""

from collections.abc import Callable
from typing import Any

from samebits.recipes.pose.skeletons import CROWDPOSE

Change = Callable[[dict[str, Any]], Any]
FAULTS: dict[str, tuple[Change, str]] = {
    "no annotations": (lambda c: c.pop("annotations"), r"no list of annotations"),
    "annotations of another kind": (lambda c: c.update(annotations=[1]), r"annotations\[0\] of .* is 1\n"),
    "other joints": (
        lambda c: c["categories"][0].update(keypoints=list(CROWDPOSE.joints)),
        r"other joints(.|\n)*data\.name=crowdpose",
    ),
    "no people": (lambda c: c["categories"][0].update(name="dog"), r"no category person(.|\n)*dog"),
    "too few numbers": (
        lambda c: c["annotations"][1].update(keypoints=[1, 2, 2]),
        r"keypoints of annotation \d+ is \[1, 2, 2\](.|\n)*at least 51 items",
    ),
    "a number that is none": (
        lambda c: c["annotations"][0]["keypoints"].__setitem__(3, "x"),
        r"keypoints\[3\] of annotation 100 is \"x\"\n(.|\n)*annotations\[0\]\.keypoints\[3\]\n",
    ),
    "a text of a number": (
        lambda c: c["annotations"][0]["keypoints"].__setitem__(50, "2"),
        r"keypoints\[50\] of annotation 100 is \"2\"\n",
    ),
    "not finite": (
        lambda c: c["annotations"][0]["bbox"].__setitem__(2, float("inf")),
        r"bbox\[2\] of annotation 100 is Infinity(.|\n)*annotations\[0\]\.bbox\[2\]\n",
    ),
    "a number that no float holds": (
        lambda c: c["annotations"][0]["bbox"].__setitem__(0, -(10**400)),
        r"bbox\[0\] of annotation 100 is -1000",
    ),
    "a number whose square no float holds": (
        lambda c: c["annotations"][0]["keypoints"].__setitem__(1, 1e300),
        r"keypoints\[1\] of annotation 100 is 1e\+300(.|\n)*less than or equal to 1000000000",
    ),
    "lists for numbers": (
        lambda c: [entry.update(bbox=[[1, 2]] * 4) for entry in c["annotations"]],
        r"bbox\[0\] of annotation 100 is \[1, 2\]",
    ),
    "an enormous area": (lambda c: c["annotations"][1].update(area=10**400), r"area of annotation \d+ is 1000"),
    "a box of less than nothing": (
        lambda c: c["annotations"][1].update(bbox=[3, 4, 5, -6]),
        r"bbox\[3\] of annotation 101 is -6\n(.|\n)*greater than or equal to 0",
    ),
    "an area below nothing": (lambda c: c["annotations"][0].update(area=-1), r"area of annotation 100 is -1\n"),
    "an area in some": (lambda c: c["annotations"][0].pop("area"), r"annotation 100 has no area"),
    "no areas": (lambda c: [entry.pop("area") for entry in c["annotations"]], r"no annotation of split val2017 has an"),
    "a crowd index that is no number": (
        lambda c: c["images"][1].update(crowdIndex="0.5"),
        r"crowdIndex of image 2 is \"0\.5\"",
    ),
    "a category that isn't there": (
        lambda c: c["annotations"][0].update(category_id=0),
        r"category_id of annotation 100 is 0(.|\n)*id of one of the file's categories",
    ),
    "no joints, as it says": (
        lambda c: c["annotations"][0].update(num_keypoints=0),
        r"num_keypoints of annotation 100 is 0(.|\n)*allowed  \d+, as many",
    ),
    "joints, as it says": (
        lambda c: c["annotations"][0].update(num_keypoints=3, keypoints=[0] * 51),
        r"num_keypoints of annotation 100 is 3(.|\n)*allowed  0, as many",
    ),
    "more joints than there are": (
        lambda c: c["annotations"][0].update(num_keypoints=18),
        r"num_keypoints of annotation 100 is 18(.|\n)*less than or equal to 17",
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
        lambda c: c["annotations"][0].update(image_id=77),
        r"image_id of annotation 100 is 77(.|\n)*id of one of",
    ),
    "a list for an owner": (lambda c: c["annotations"][0].update(image_id=[1]), r"image_id of annotation 100 is \[1\]"),
    "two of one number": (
        lambda c: c["images"][1].update(id=1),
        r"id 1 comes twice in images(.|\n)*images\[0\] and images\[1\]",
    ),
    "a size of nothing": (lambda c: c["images"][1].update(width=0), r"width of image 2 is 0(.|\n)*images\[1\]\.width"),
    "an enormous side": (
        lambda c: c["images"][0].update(width=10**400),
        r"width of image 1 is 1000.{,60}\n(.|\n)*less than or equal to 178956970",
    ),
    "an enormous picture": (lambda c: c["images"][0].update(width=10**6, height=10**6), r"image 1 is 1000000x1000000"),
    "a way out of the folder": (
        lambda c: c["images"][0].update(file_name="../../etc/passwd"),
        r"file_name of image 1 is",
    ),
    "an absolute name": (lambda c: c["images"][0].update(file_name="/etc/passwd"), r"file_name of image 1 is"),
    "a picture that is missing": (
        lambda c: c["images"][0].update(file_name="gone.jpg"),
        r"1 of 2 images are missing(.|\n)*gone\.jpg",
    ),
    "a broken region": (
        lambda c: c["annotations"][0].update(iscrowd=1, segmentation=[[1, 2]]),
        r"segmentation of annotation 100 is \[\[1, 2\]\]",
    ),
    "an outline of no numbers": (
        lambda c: c["annotations"][0].update(iscrowd=1, segmentation=[[1, 2, float("nan"), 2, 5, 5]]),
        r"segmentation of annotation 100 is \[\[1, 2, NaN(.|\n)*annotations\[0\]\.segmentation(.|\n)*finite",
    ),
    "enormous run lengths": (
        lambda c: c["annotations"][0].update(iscrowd=1, segmentation={"size": [64, 64], "counts": [10**30]}),
        r"segmentation of annotation 100 is \{",
    ),
    "an enormous number of keypoints": (
        lambda c: c["annotations"][0].update(num_keypoints=10**30),
        r"num_keypoints of annotation 100 is 1000",
    ),
    "an enormous id": (lambda c: c["annotations"][0].update(id=10**30), r"id of annotation number 0 is 1000"),
    "joints that are no list": (
        lambda c: c["categories"][0].update(keypoints=5),
        r"has other joints than coco(.|\n)*given  +5\n",
    ),
}
