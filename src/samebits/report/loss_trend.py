"""Whether the training loss grows over many steps, as it does with too high a learning rate."""

import math
from collections.abc import Sequence

# steps
_MIN_BLOCK = 4
_MAX_BLOCK = 50
_NUM_HIGH = 2  # blocks, so that a single one, such as one after a change of the learning rate, does not count
_NOTABLE = 0.5  # of the first loss


class LossTrend:
    """Averages the loss over blocks of a run's steps, and notices once that it grows."""

    def __init__(self, num_steps: int) -> None:
        self._size = block_size(num_steps)
        self.start(0, None)

    def start(self, step: int, first_loss: float | None) -> None:
        """Start training, or resume it after so many steps of a run that began with `first_loss`."""
        self._begin = step
        self._first = first_loss
        self._is_said = False
        self._means: list[float] = []
        self._losses: list[float] = []

    def add(self, loss: float) -> str | None:
        """Add the next step's mean loss, if it is finite; return a notice, once, if the loss grows."""
        self._losses.append(loss)
        if self._is_said or len(self._losses) < self._size:
            return None
        finite = [each for each in self._losses if math.isfinite(each)]
        self._losses = []
        # A block without a finite loss is the highest of all, not an unknown one.
        self._means.append(math.fsum(finite) / len(finite) if finite else math.inf)
        low = grows_from(self._means, self._first)
        if low is None:
            return None
        self._is_said = True
        return f"the training loss grows: from {self._block(low)} to {self._block(len(self._means) - 1)}"

    def _block(self, place: int) -> str:
        first = self._begin + place * self._size
        return f"{self._means[place]:.4g} in steps {first + 1:,}-{first + self._size:,}"


def block_size(num_steps: int) -> int:
    """Return the number of steps to average over: a tenth of the run, from 4 to 50."""
    return min(max(num_steps // 10, _MIN_BLOCK), _MAX_BLOCK)


def grows_from(means: Sequence[float], first: float | None = None) -> int | None:
    """Return the block with the lowest mean if the last two blocks are far above it; else None.

    Far is half of the first loss, at which nothing was learned. Noise is much less, also at the end of a run, where the
    loss is low and a batch may have twice the loss of another.
    """
    before = means[:-_NUM_HIGH]
    high = means[-_NUM_HIGH:]
    if not before:
        return None
    low = min(range(len(before)), key=before.__getitem__)
    # Of a resumed run, the first loss is that of the whole run: its own first block may be low already.
    scale = max(abs(means[0] if first is None else first), abs(before[low]))
    # Of both blocks the lower one, so that a single high block gives no notice.
    return low if min(high) - before[low] > _NOTABLE * scale else None
