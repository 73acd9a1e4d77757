"""Counter-based random numbers: a pure function of a key, without generator state.

A key is 64 bits, mixed from (seed, purpose, index). No number depends on the numbers drawn before, or on the process
that draws it; JAX's random keys work in the same way. The mixing function is the finalizer of SplitMix64 (Steele, Lea
and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), a bijection of 64-bit integers.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# Purposes of keys: two uses of the same seed never share numbers.
ORDER = 1
SAMPLE = 2
FORWARD = 3
DATA = 4
CHECK = 5


def mix(value: int) -> int:
    """Hash 64 bits: a bijection in which each input bit flips about half of the output bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix_array(values: KeyArray) -> KeyArray:
    """Apply `mix` to each element of an array of any shape. Does not change its argument."""
    # NumPy's uint64 wraps around, as `& MASK` does in `mix`.
    values = values + np.uint64(GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def key(seed: int, *parts: int) -> int:
    """Derive a key in [0, 2**64) from a seed and any number of integers, whose order matters."""
    # The seed is mixed twice, since parts are mixed once: otherwise seed and first part could be swapped, and equal
    # ones would cancel out.
    value = mix(mix(seed & MASK))
    for part in parts:
        value = mix(value ^ mix(part & MASK))
    return value


def keys(seed: int, epoch: int, indices: IntArray) -> KeyArray:
    """Derive the keys of samples, (N,): `key(seed, SAMPLE, epoch, index)` for each index. `indices`: (N,) samples."""
    start = np.uint64(key(seed, SAMPLE, epoch))
    return mix_array(start ^ mix_array(indices.astype(np.uint64)))


def uniform(keys: KeyArray, column: int) -> npt.NDArray[np.float64]:
    """Return one uniform number in [0, 1) for each key, (N,). Different columns, from 0, are independent."""
    return uniforms(keys, range(column, column + 1))[:, 0]


def uniforms(keys: KeyArray, columns: range) -> npt.NDArray[np.float64]:
    """Return `uniform` for several columns, (N, C)."""
    mixed = np.array([mix(column) for column in columns], np.uint64)
    values = mix_array(keys[:, None] ^ mixed)
    # 53 bits: as many as a float64 holds exactly, so the largest result is still below 1.
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
