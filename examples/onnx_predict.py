"""Classify images with an exported model: onnxruntime, numpy and Pillow, without torch and without Samebits.

samebits export RUN --to onnx --out model.onnx
python examples/onnx_predict.py model.onnx photo.jpg ...
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
texts = session.get_modelmeta().custom_metadata_map
_, height, width = json.loads(texts["input"])  # of one image: channels, height, width
classes, mean, std, steps = (json.loads(texts[name]) for name in ("classes", "mean", "std", "preprocess"))


def read(path):
    """Read an image file as the model's input, (C, H, W) float32."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.has_transparency_data:  # on white, as in a viewer
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB" if steps["colors"] == "RGB" else "L")
    if "resize_px" in steps:  # the whole image, without keeping its shape
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    else:  # the shorter side, then the center
        factor = steps["resize_shorter_px"] / min(image.size)
        image = image.resize([round(side * factor) for side in image.size], Image.Resampling.BILINEAR)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / 255
    return ((pixels - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)


for path in sys.argv[2:]:
    (logits,) = session.run(None, {"input": read(path)[None]})
    shares = np.exp(logits[0] - logits[0].max())
    shares /= shares.sum()
    print(f"{path}  class {classes[shares.argmax()]}  probability {shares.max():.2%}")
