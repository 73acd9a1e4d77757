"""Train one of torchvision's detectors on a COCO folder, with equal weights and mAP at any number of processes.

python examples/detection.py images annotations.json
torchrun --nproc-per-node 3 examples/detection.py images annotations.json --model maskrcnn_resnet50_fpn --epochs 12

Boxes come from all models, masks from maskrcnn_*. Started again, it resumes after the last finished epoch.
"""

import argparse
import os

import numpy as np
import torch
import torchvision
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as coco_mask
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import tv_tensors
from torchvision.transforms import v2

import samebits

AUGMENTED = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
PLAIN = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])


class Detections(Dataset):
    """Images and targets of a COCO file: `boxes` (n, 4) in pixels as x1, y1, x2, y2, `labels` (n,), `masks` (n, h, w).

    Args:
        root: Folder of the images.
        coco: The annotations.
        transform: Transforms image and target; the evaluation has none.
        with_masks: Whether targets have masks.
    """

    def __init__(self, root, coco, transform, with_masks):
        self.root, self.coco, self.transform, self.with_masks = root, coco, transform, with_masks
        self.image_ids = sorted(coco.getImgIds())
        # Labels count from 1, as 0 is the background of torchvision's detectors; COCO's numbers have gaps.
        self.labels = {category: label for label, category in enumerate(sorted(coco.getCatIds()), 1)}

    def __len__(self):
        return len(self.image_ids)

    def objects(self, index):
        """Return the annotations that training uses: crowds and boxes without an area have no target."""
        found = self.coco.loadAnns(self.coco.getAnnIds(imgIds=[self.image_ids[index]]))
        return [each for each in found if not each.get("iscrowd") and min(each["bbox"][2:]) >= 1]

    def __getitem__(self, index):
        record = self.coco.loadImgs([self.image_ids[index]])[0]
        path = os.path.join(self.root, record["file_name"])
        image = torchvision.io.decode_image(path, mode="RGB")
        size, objects = image.shape[-2:], self.objects(index)
        boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor([self.labels[each["category_id"]] for each in objects], dtype=torch.int64),
        }
        if self.with_masks:
            masks = np.zeros((len(objects), *size), np.uint8)
            for number, each in enumerate(objects):
                masks[number] = self.coco.annToMask(each)
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        return self.transform(tv_tensors.Image(image), target)


def collate(samples):
    """Keep images and targets as lists: they have different sizes."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def coco_results(output, image_id, categories):
    """Return a detector's output for one image in COCO's results format: plain values, which ranks can exchange."""
    boxes = output["boxes"].clone()
    boxes[:, 2:] -= boxes[:, :2]
    results = [
        {"image_id": image_id, "category_id": categories[label], "bbox": box, "score": score}
        for box, label, score in zip(boxes.tolist(), output["labels"].tolist(), output["scores"].tolist(), strict=True)
    ]
    for result, mask in zip(results, output.get("masks", ()), strict=False):
        lengths = coco_mask.encode(np.asfortranarray(mask[0].numpy() > 0.5))
        counts = lengths["counts"]
        result["segmentation"] = {
            "size": [int(side) for side in lengths["size"]],
            "counts": counts.decode() if isinstance(counts, bytes) else counts,
        }
    return results


def detector(name, backbone, num_classes, size):
    """Return a detector of torchvision; `size` is the shorter side of its input, pixels, which SSDs don't take."""
    sizes = {} if name.startswith("ssd") else {"min_size": size}
    return torchvision.models.get_model(name, weights=None, weights_backbone=backbone, num_classes=num_classes, **sizes)


def evaluate(model, loader, dataset):
    """Return mAP of boxes and, if the model has them, of masks, equal on all ranks. Each image counts once."""
    categories = {label: category for category, label in dataset.labels.items()}
    model.eval()
    with torch.no_grad():
        for images, targets in loader:
            outputs = model(images)
            loader.collect(
                coco_results(output, int(target["image_id"]), categories)
                for output, target in zip(outputs, targets, strict=True)
            )
    results = [result for of_image in loader.collected() for result in of_image]
    scores = {}
    for kind in ("bbox", "segm") if dataset.with_masks else ("bbox",):
        scores[kind] = -1.0
        if results:
            evaluation = COCOeval_faster(
                dataset.coco, dataset.coco.loadRes(results), kind, print_function=lambda _: None
            )
            evaluation.params.imgIds = dataset.image_ids
            evaluation.run()
            scores[kind] = float(evaluation.stats[0])
    return scores


class WithImageId(Dataset):
    """The images of an evaluation, with their numbers as targets."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index][0], {"image_id": self.dataset.image_ids[index]}


def main():
    parser = argparse.ArgumentParser(description="Train a detector on a folder in COCO's format.")
    parser.add_argument("images", help="folder of the training images")
    parser.add_argument("annotations", help="COCO file of the training images")
    parser.add_argument("--val-images", help="folder of the validation images; the training images if left out")
    parser.add_argument("--val-annotations", help="COCO file of the validation images")
    parser.add_argument(
        "--model", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="the name of a detector of torchvision"
    )
    parser.add_argument(
        "--backbone", help="pretrained weights of the backbone, such as DEFAULT; random ones if left out"
    )
    parser.add_argument("--size", type=int, default=320, help="length of the shorter side, pixels")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=16, help="images of a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="images of one forward pass")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--checkpoint", default="detection.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    with_masks = args.model.startswith("maskrcnn")
    train_data = Detections(args.images, COCO(args.annotations), AUGMENTED, with_masks)
    val_coco = COCO(args.val_annotations) if args.val_annotations else train_data.coco
    val_data = Detections(args.val_images or args.images, val_coco, PLAIN, with_masks)
    # As in torchvision's reference script, images without objects are not trained on.
    used = Subset(train_data, [index for index in range(len(train_data)) if train_data.objects(index)])

    model = detector(args.model, args.backbone, len(train_data.labels) + 1, args.size)
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=args.lr, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.epochs * 2 // 3, args.epochs * 8 // 9])
    loader = DataLoader(
        used, batch_size=args.micro_batch, shuffle=True, num_workers=args.workers, collate_fn=collate, drop_last=True
    )
    val_loader = samebits.EvalLoader(DataLoader(WithImageId(val_data), batch_size=1, collate_fn=collate))
    model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=args.global_batch)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    if os.path.exists(args.checkpoint):
        for name, state in torch.load(args.checkpoint, map_location="cpu", weights_only=True).items():
            parts[name].load_state_dict(state)

    for epoch in range(loader.epoch, args.epochs):
        model.train()
        for images, targets in loader:
            optimizer.zero_grad()
            loss = sum(model(images, targets).values())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        scheduler.step()
        scores = evaluate(model, val_loader, val_data)
        if val_loader.world.is_main:
            text = "  ".join(f"{kind} mAP {value:.17g}" for kind, value in scores.items())
            print(f"epoch {epoch + 1}: {text}", flush=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{args.checkpoint}.new")
            os.replace(f"{args.checkpoint}.new", args.checkpoint)  # a kill leaves a whole file

    if val_loader.world.is_main:
        print(samebits.weights_sha256(model.state_dict()))


if __name__ == "__main__":
    main()
