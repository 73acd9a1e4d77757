"""Whether a classifier's answers have anything to do with its inputs."""

import math
from dataclasses import dataclass

from torch import Tensor

_MIN_SAMPLES = 10
_ALL = 0.99
_STDS = 2.0


@dataclass(frozen=True)
class Guess:
    """Accuracy of answers that ignore the input, but have the same frequencies."""

    accuracy: float  #: Its expected value, from 0 to 1.
    std: float  #: Standard deviation of the accuracy over so many samples.


def guess(labels: Tensor, answers: Tensor) -> Guess:
    """Return the accuracy of answers that ignore the input; Cohen's kappa compares with the same value.

    Both arrays, (C,), count a class's samples and answers. Their sums are equal, and above 0.
    """
    num_samples = int(labels.sum())
    # Python's integers: the products of counts may exceed 64 bits.
    agreeing = sum(one * other for one, other in zip(labels.tolist(), answers.tolist(), strict=True))
    accuracy = agreeing / num_samples**2
    return Guess(accuracy, math.sqrt(accuracy * (1 - accuracy) / num_samples))


def is_guessing(labels: Tensor, answers: Tensor, num_correct: int) -> bool:
    """Return whether an accuracy is within two standard deviations of answers that ignore the input.

    With so few samples that a perfect classifier could not be distinguished from these, it is False. Counts are (C,).
    """
    num_samples = int(labels.sum())
    if num_samples < _MIN_SAMPLES:
        return False
    chance = guess(labels, answers)
    highest = chance.accuracy + _STDS * chance.std
    return num_correct / num_samples <= highest < 1


def single_answer(labels: Tensor, answers: Tensor) -> int | None:
    """Return the class that takes all answers, or all but one in a hundred, where the samples have several classes.

    Both arrays, (C,), count a class's samples and answers.
    """
    num_samples = int(labels.sum())
    if num_samples < _MIN_SAMPLES:
        return None
    most = int(answers.argmax())
    is_one = int(answers[most]) >= _ALL * num_samples
    return most if is_one and int(labels[most]) < (2 * _ALL - 1) * num_samples else None
