"""ResNets for small images.

The networks of He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), table 1, with two changes
that are usual for CIFAR-10's 32x32 pixels: the first convolution is 3x3 with stride 1 and no pooling follows it, so the
last feature map is 4x4. In bottleneck blocks the 3x3 convolution has the stride. Parameters have the names that
torchvision's ResNets give them (conv1, layer1.0.conv1, layer1.0.downsample.0, fc, ...).

Written here because no library gives them beside a torch that has no torchvision: timm imports torchvision, and
pytorchcv asks for it and has other depths for CIFAR-10.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut; [N, inputs, H, W] to [N, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(images)))
        out = self.bn2(self.conv2(out))
        return functional.relu(out + (images if self.downsample is None else self.downsample(images)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and the shortcut; [N, inputs, H, W] to [N, 4 width, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _convolution(inputs, width, 1, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(images)))
        out = functional.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return functional.relu(out + (images if self.downsample is None else self.downsample(images)))


Block = BasicBlock | Bottleneck
# Blocks of each of the four stages.
ARCHITECTURES: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Images [N, 3, H, W] to scores [N, num_classes]; H and W are multiples of 8.

    Args:
        architecture: a name in ARCHITECTURES.
    """

    def __init__(self, architecture: str, num_classes: int = 10) -> None:
        super().__init__()
        block, depths = ARCHITECTURES[architecture]
        self.conv1 = _convolution(3, 64, 3, 1)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852), by the number of outputs.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(images)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.fc(out.mean(dim=(2, 3)))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _stage(block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, stride: int) -> nn.Module:
    later = [block(width * block.expansion, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(inputs, width, stride), *later)
