"""Portable arithmetic in plain Python integers, written from docs/portable.md and not from the package's code."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

TINY = {np.float32: 2.0**-126, np.float64: 2.0**-1022}  # the smallest normal numbers


def on_grid(values: Sequence[float], bits: int, kind: type = np.float32) -> tuple[list[int], int]:
    """Integers of at most `bits` bits, and the exponent of the power of two to multiply them by."""
    # The e with 2**(e - 1) <= max < 2**e, where smaller ones count as the smallest normal number times 2**bits.
    e = math.frexp(max([TINY[kind] * 2.0**bits, *map(abs, values)]))[1]
    # Python rounds a fraction half to even.
    return [round(Fraction(value) * Fraction(2) ** (bits - e)) for value in values], e - bits


def product(rows: Sequence[Sequence[float]], columns: Sequence[Sequence[float]]) -> list[list[np.float32]]:
    """Rows times columns."""
    left, right = [on_grid(row, 20) for row in rows], [on_grid(column, 20) for column in columns]
    return [[scaled(sum(a * b for a, b in zip(p, q, strict=True)), e + f) for q, f in right] for p, e in left]


def scaled(total: int, exponent: int) -> np.float32:
    """An integer as float64 times a power of two, rounded to float32."""
    with np.errstate(over="ignore"):
        return np.float32(math.ldexp(float(total), exponent))


def exact_sum(values: Sequence[float], kind: type = np.float32) -> float:
    """The sum of a list of numbers of a type."""
    if len(values) == 1:
        return values[0]
    bits = min(40, 53 - max(len(values) - 1, 1).bit_length())
    integers, e = on_grid(values, bits, kind)
    return math.ldexp(float(sum(integers)), e)


def convolve(x: np.ndarray, w: np.ndarray, stride: int, padding: int, dilation: int) -> np.ndarray:
    """(N, C, H, W) with (O, C, k, k)."""
    kernel = w.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    reach = dilation * (kernel - 1) + 1
    size = [(padded.shape[2 + d] - reach) // stride + 1 for d in (0, 1)]
    weights = [on_grid(each.ravel().tolist(), 20) for each in w]
    result = np.zeros((len(x), len(w), *size), np.float32)
    for n, image in enumerate(padded):
        integers, e = on_grid(image.ravel().tolist(), 20)
        whole = np.array(integers, dtype=object).reshape(image.shape)
        for i, j in np.ndindex(*size):
            y, z = i * stride, j * stride
            patch = whole[:, y : y + reach : dilation, z : z + reach : dilation].ravel().tolist()
            for o, (taps, f) in enumerate(weights):
                total = sum(a * b for a, b in zip(patch, taps, strict=True))
                result[n, o, i, j] = scaled(total, e + f)
    return result


def _whole(x: np.ndarray, axes: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Integers of an array that has a grid for each place of one axis, and the exponents of these."""
    (axis,) = set(range(x.ndim)) - set(axes)
    parts = [on_grid(each.ravel().tolist(), 20) for each in np.moveaxis(x, axis, 0)]
    whole = np.array([integers for integers, _ in parts], dtype=object)
    return np.moveaxis(whole.reshape(np.moveaxis(x, axis, 0).shape), 0, axis), [e for _, e in parts]


def gradients(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, stride: int, padding: int, dilation: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the input and of the weights of `convolve`."""
    of_sample, samples = _whole(g, (1, 2, 3))
    of_weight, channels = _whole(w, (0, 2, 3))
    of_output, outputs = _whole(g, (0, 2, 3))
    of_input, inputs = _whole(x, (0, 2, 3))
    first, second = np.zeros(x.shape, dtype=object), np.zeros(w.shape, dtype=object)
    for n, o, i, j in np.ndindex(*g.shape):
        for c, a, b in np.ndindex(*w.shape[1:]):
            y, z = i * stride + a * dilation - padding, j * stride + b * dilation - padding
            if 0 <= y < x.shape[2] and 0 <= z < x.shape[3]:
                first[n, c, y, z] += of_sample[n, o, i, j] * of_weight[o, c, a, b]
                second[o, c, a, b] += of_output[n, o, i, j] * of_input[n, c, y, z]
    left, right = np.zeros(x.shape, np.float32), np.zeros(w.shape, np.float32)
    for place in np.ndindex(*x.shape):
        left[place] = scaled(first[place], samples[place[0]] + channels[place[1]])
    for place in np.ndindex(*w.shape):
        right[place] = scaled(second[place], outputs[place[0]] + inputs[place[1]])
    return left, right


def random_bits(key: int, index: int) -> int:
    """63 bits of number `index` of a draw."""
    mask = (1 << 64) - 1
    x = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return (x ^ (x >> 31)) >> 1
