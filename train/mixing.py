"""Mixup and CutMix: each image of a micro-batch is mixed with its neighbour there, and so is what it is to be called.

(arxiv.org/abs/1710.09412, arxiv.org/abs/1905.04899.) What is drawn depends on (seed, position, rank, micro-batch), so
a run that is resumed draws it again. Which images are neighbours depends on how many ranks and micro-batches share a
window: on another number of them the same samples come in the same order, and are mixed in other pairs.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from train.config import AugmentConfig
from train.loader import Batch


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """images: [n, 3, size, size], 0..255, uint8 or float32. labels, others: int64 [n]. share: of `labels`, 0..1."""

    images: torch.Tensor
    labels: torch.Tensor
    others: torch.Tensor
    share: float

    def losses(self, logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
        """Cross entropy of each sample, [n], against both of its labels by their shares."""
        own = cross_entropy(logits, self.labels, reduction="none", label_smoothing=label_smoothing)
        if self.share == 1:
            return own
        other = cross_entropy(logits, self.others, reduction="none", label_smoothing=label_smoothing)
        return self.share * own + (1 - self.share) * other


def mix(batch: Batch, config: AugmentConfig, random: np.random.Generator) -> Mixed:
    """Mix a micro-batch as `augment.mixup` and `augment.cutmix` say; where both are set, one of them, by a coin."""
    kinds = [kind for kind in ("mixup", "cutmix") if getattr(config, kind)]
    if not kinds:
        return Mixed(images=batch.images, labels=batch.labels, others=batch.labels, share=1.0)
    kind = kinds[random.integers(len(kinds))]
    concentration = getattr(config, kind)
    share = float(random.beta(concentration, concentration))
    own = torch.arange(len(batch.labels), device=batch.labels.device)
    # Of a sample that weighs nothing nobody learns: beside one, an image is mixed with itself.
    neighbour = own.roll(1).where(batch.weights.roll(1) > 0, own)
    neighbours = batch.images[neighbour]
    if kind == "mixup":
        images = batch.images.float().lerp(neighbours.float(), 1 - share)
    else:
        images, share = _pasted(batch.images, neighbours, share, random)
    return Mixed(images=images, labels=batch.labels, others=batch.labels[neighbour], share=share)


def _pasted(
    images: torch.Tensor, neighbours: torch.Tensor, share: float, random: np.random.Generator
) -> tuple[torch.Tensor, float]:
    """A box of 1 - share of the area comes from the neighbour; returns the share that is really left."""
    height, width = images.shape[-2:]
    box_height, box_width = (round(side * math.sqrt(1 - share)) for side in (height, width))
    top, left = random.integers(height - box_height + 1), random.integers(width - box_width + 1)
    box = (..., slice(top, top + box_height), slice(left, left + box_width))
    images = images.clone()
    images[box] = neighbours[box]
    return images, 1 - box_height * box_width / (height * width)
