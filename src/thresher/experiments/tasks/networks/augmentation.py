"""Random views of training images, made by the network itself: the same data, another image in each epoch."""

import torch
from torch import Tensor, nn


class RandomView(nn.Module):
    """Mirrors, shifts and erases parts of the images of a batch at random in training mode; passes them on in eval mode.

    Args:
        shift: Largest shift in pixels, in each direction, 0 or more. Default: 2.
        erase: Chance that a square of an image is set to 0, the mean of normalised images, [0, 1]. Default: 0.1.
        side: Side of that square in pixels. Default: 8.
    """

    def __init__(self, shift: int = 2, erase: float = 0.1, side: int = 8) -> None:
        super().__init__()
        self.shift, self.erase, self.side = shift, erase, side

    def forward(self, images: Tensor) -> Tensor:
        """Returns views of images of shape (N, channels, H, W)."""
        if not self.training:
            return images
        n, _, height, width = images.shape
        draws = torch.rand(6, n, 1, device=images.device)
        down, right = ((2 * self.shift + 1) * draws[:2] - self.shift).floor().long()
        rows = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)
        columns = (torch.arange(width, device=images.device) + right).clamp(0, width - 1)
        columns = torch.where(draws[2] < 0.5, width - 1 - columns, columns)
        views = images.gather(2, rows[:, None, :, None].expand_as(images)).gather(3, columns[:, None, None].expand_as(images))
        tops, lefts = (draws[3] * (height - self.side + 1)).floor(), (draws[4] * (width - self.side + 1)).floor()
        within = self._within(height, tops)[:, :, None] & self._within(width, lefts)[:, None, :]
        return views.masked_fill((within & (draws[5] < self.erase)[:, :, None])[:, None], 0.0)

    def _within(self, size: int, start: Tensor) -> Tensor:
        at = torch.arange(size, device=start.device)
        return (at >= start) & (at < start + self.side)
