"""E4M3 by its definition, with exact arithmetic: the independent implementation that tests of formats compare with."""

from fractions import Fraction

NAN_CODE = 0x7F
LARGEST_CODE = 0x7E


def value(code: int) -> Fraction:
    """What a code from 0 to 0x7E stands for: 4 exponent bits with bias 7, 3 fraction bits."""
    exponent, fraction = code >> 3, code & 7
    if exponent == 0:
        return Fraction(fraction, 2**9)
    return Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)


VALUES = [value(code) for code in range(NAN_CODE)]


def nearest_code(x: float) -> int:
    """The code nearest to a number within ±448, a tie going to the even code."""
    magnitude = Fraction(abs(x))
    code = min(range(NAN_CODE), key=lambda code: (abs(VALUES[code] - magnitude), code & 1))
    return code | (0x80 if x < 0 else 0)
