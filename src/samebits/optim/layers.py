"""Depth of each parameter in a model of repeated blocks, for a learning rate that decays from layer to layer."""

import re
from collections.abc import Sequence

from samebits.errors import ConfigError

# A numbered entry (blocks.3, layer2.0, encoder.layers.encoder_layer_3) with named modules inside. An entry that is a
# single layer (`stem.0.weight`) is no block.
_BLOCK = re.compile(r"(?:.*?\.)?(?:\w+[_-])?\d+(?:\.\d+)*(?=\.[^.\d][^.]*\.)")


def layer_scales(names: Sequence[str], decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter: decay ** (number of layers above it).

    As in BEiT (Bao et al., ICLR 2022) and MAE: the stem and position embeddings are layer 0, blocks are layers 1 to B,
    and the final norm and the head are layer B + 1, whose factor is 1. timm counts the final norm as one layer more.

    Raises:
        ConfigError: The model has no repeated blocks.
    """
    found = {name: match[0] for name in names if (match := _BLOCK.match(name))}
    blocks = list(dict.fromkeys(found.values()))
    if len(blocks) < 2:
        raise ConfigError(
            "optim.layer_decay needs a model of repeated blocks, and this one has none",
            given=f"parameters {', '.join(list(names)[:3])}, …",
            allowed="blocks with numbered names, such as blocks.0.norm.weight",
            fix="Set optim.layer_decay=null.",
        )
    depth = {block: index + 1 for index, block in enumerate(blocks)}
    last = max(index for index, name in enumerate(names) if name in found)
    first = min(index for index, name in enumerate(names) if name in found)
    scales, current = {}, 0
    for index, name in enumerate(names):
        if name in found:
            current = depth[found[name]]
        elif index > last:
            current = len(blocks) + 1
        elif index < first:
            current = 0
        scales[name] = decay ** (len(blocks) + 1 - current)
    return scales
