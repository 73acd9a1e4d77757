"""HigherHRNet: four branches of different resolutions that exchange features, and heatmaps at 1/4 and 1/2.

Cheng et al., "HigherHRNet: Scale-aware representation learning for bottom-up human pose estimation", CVPR 2020, on the
trunk of Sun et al., "Deep high-resolution representation learning for human pose estimation", CVPR 2019. Tensors are
named as in the authors' implementations, so that their checkpoints load.

Legend: N images, H and W their height and width, K joints, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samebits.recipes.backbones import Pyramid, freeze_parts
from samebits.recipes.pose.config import ModelConfig

EXPANSION = 4  # ratio of output to inner channels of a bottleneck
INIT_STD = 0.001


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (N, C, H, W) -> the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, width, kernel=3)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, kernel=3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        out = self.relu(self.bn1(self.conv1(x)))
        # In place: no backward pass needs batch norm's output.
        return self.relu(self.bn2(self.conv2(out)).add_(x))  # type: ignore[no-any-return]  # a module's call is Any


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: (N, C, H, W) -> (N, 4 width, H, W)."""

    def __init__(self, channels_in: int, width: int) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        self.conv1 = _conv(channels_in, width, kernel=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, kernel=3)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, channels_out, kernel=1)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if channels_in != channels_out:
            self.downsample = nn.Sequential(*_conv_norm(channels_in, channels_out, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, 4 width, H, W)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)).add_(self.downsample(x)))  # type: ignore[no-any-return]  # a module's call is Any


class Module(nn.Module):
    """Branches at 1/4, 1/8 ...: residual blocks in each, then the sum of all branches in each."""

    def __init__(self, widths: Sequence[int], num_blocks: int, num_out: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(BasicBlock(width) for _ in range(num_blocks))) for width in widths
        )
        self.fuse_layers = nn.ModuleList(
            nn.ModuleList(_exchange(widths, source, target) for source in range(len(widths)))
            for target in range(num_out)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Compute the first `num_out` branches from all of them: (N, C, H, W), (N, 2C, H/2, W/2) ..."""
        xs = [branch(x) for branch, x in zip(self.branches, xs, strict=True)]
        fused = []
        for layers in self.fuse_layers:
            assert isinstance(layers, nn.ModuleList)
            total, *rest = [layer(x) for layer, x in zip(layers, xs, strict=True)]
            for term in rest:
                # Not in place: the first term may be a branch itself, which other sums use too.
                total = total + term
            fused.append(self.relu(total))
        return fused


class HigherHRNet(nn.Module):
    """The network."""

    def __init__(self, config: ModelConfig, num_joints: int) -> None:
        super().__init__()
        num_maps = 2 * num_joints  # heatmaps and tags
        stem = config.stem_width
        widths = [config.width << place for place in range(4)]
        self.conv1 = _conv(3, stem, kernel=3, stride=2)
        self.bn1 = nn.BatchNorm2d(stem)
        self.conv2 = _conv(stem, stem, kernel=3, stride=2)
        self.bn2 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        inner = [Bottleneck(EXPANSION * stem, stem) for _ in range(config.stem_blocks - 1)]
        self.layer1 = nn.Sequential(Bottleneck(stem, stem), *inner)
        self.transition1 = nn.ModuleList(
            # The first one keeps the resolution and changes only the number of channels.
            [
                nn.Sequential(
                    *_conv_norm(EXPANSION * stem, widths[0], kernel=3), nn.ReLU(inplace=True)
                ),
                _halve(EXPANSION * stem, widths[1]),
            ]
        )
        self.stage2 = _stage(widths[:2], config.num_modules[0], config.num_blocks)
        self.transition2 = nn.ModuleList(
            [nn.Identity(), nn.Identity(), _halve(widths[1], widths[2])]
        )
        self.stage3 = _stage(widths[:3], config.num_modules[1], config.num_blocks)
        self.transition3 = nn.ModuleList(
            [*(nn.Identity() for _ in range(3)), _halve(widths[2], widths[3])]
        )
        self.stage4 = _stage(widths, config.num_modules[2], config.num_blocks, num_out=1)
        fine = config.width
        self.final_layers = nn.ModuleList(
            [nn.Conv2d(widths[0], num_maps, 1), nn.Conv2d(fine, num_joints, 1)]
        )
        deconvolution = _double(widths[0] + num_maps, fine)
        blocks = [nn.Sequential(BasicBlock(fine)) for _ in range(config.deconv_blocks)]
        self.deconv_layers = nn.ModuleList([nn.Sequential(deconvolution, *blocks)])
        self._initialize()

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute heatmaps and tags of (N, 3, H, W) normalized images; H and W are multiples of 32.

        Returns:
            (N, 2 K, H/4, W/4): heatmaps, then tags; and (N, K, H/2, W/2): heatmaps.
        """
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer1(self.relu(self.bn2(self.conv2(x))))
        xs = [transition(x) for transition in self.transition1]
        for stage, transition in ((self.stage2, self.transition2), (self.stage3, self.transition3)):
            xs = stage(xs)
            xs.append(transition[-1](xs[-1]))
        features: Tensor = self.stage4(xs)[0]
        coarse = self.final_layers[0](features)
        fine = self.deconv_layers[0](torch.cat((features, coarse), dim=1))
        return [coarse, self.final_layers[1](fine)]

    def _initialize(self) -> None:
        # As in the authors' implementation. The batch norms compensate for weights this small.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class PyramidPose(nn.Module):
    """HigherHRNet's head on the merged feature maps of a network of timm."""

    def __init__(self, config: ModelConfig, num_joints: int) -> None:
        super().__init__()
        width = config.width
        num_maps = 2 * num_joints  # heatmaps and tags
        self.pyramid = Pyramid(config.name, width)
        self.coarse = nn.Conv2d(width, num_maps, 1)
        self.finer = _double(width + num_maps, width)
        self.fine = nn.Conv2d(width, num_joints, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute heatmaps and tags of (N, 3, H, W) normalized images, as `HigherHRNet` does."""
        features = self.pyramid(images)
        coarse = self.coarse(features)
        return [coarse, self.fine(self.finer(torch.cat((features, coarse), dim=1)))]


def build_model(config: ModelConfig, num_joints: int) -> nn.Module:
    """Build the network of the settings, on the CPU, with frozen parts."""
    model = PyramidPose(config, num_joints) if config.is_timm else HigherHRNet(config, num_joints)
    freeze_parts(model, config.freeze)
    return model


def _conv(channels_in: int, channels_out: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


def _conv_norm(
    channels_in: int, channels_out: int, *, kernel: int, stride: int = 1
) -> list[nn.Module]:
    return [
        _conv(channels_in, channels_out, kernel=kernel, stride=stride),
        nn.BatchNorm2d(channels_out),
    ]


def _halve(channels_in: int, channels_out: int) -> nn.Module:
    """Make the transition from the coarsest branch to a new one of half its resolution."""
    return nn.Sequential(
        nn.Sequential(
            *_conv_norm(channels_in, channels_out, kernel=3, stride=2), nn.ReLU(inplace=True)
        )
    )


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    """Make the layers that double the resolution."""
    return nn.Sequential(
        nn.ConvTranspose2d(channels_in, channels_out, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


def _stage(
    widths: Sequence[int], num_modules: int, num_blocks: int, num_out: int | None = None
) -> nn.Sequential:
    outs = [len(widths)] * (num_modules - 1) + [num_out or len(widths)]
    return nn.Sequential(*(Module(widths, num_blocks, out) for out in outs))


def _exchange(widths: Sequence[int], source: int, target: int) -> nn.Module:
    """Make the layers between a branch and the sum in another branch."""
    if source == target:
        return nn.Identity()
    if source > target:
        # Nearest-neighbor upsampling by a whole factor: its gradient adds up in a fixed order, on GPUs too.
        larger = nn.Upsample(scale_factor=2 ** (source - target), mode="nearest")
        return nn.Sequential(*_conv_norm(widths[source], widths[target], kernel=1), larger)
    steps = []
    for step in range(source, target):
        is_last = step == target - 1
        layers = _conv_norm(
            widths[source], widths[target] if is_last else widths[source], kernel=3, stride=2
        )
        steps.append(
            nn.Sequential(*layers) if is_last else nn.Sequential(*layers, nn.ReLU(inplace=True))
        )
    return nn.Sequential(*steps)
