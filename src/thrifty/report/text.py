"""Numbers as people read them."""

from __future__ import annotations

import math


def count(value: float, digits: int = 3) -> str:
    """Returns a count with a suffix: `950`, `12.3k`, `4.10M`, `1.2B`.

    >>> count(950), count(12_345), count(4_100_000)
    ('950', '12.3k', '4.1M')
    """
    if not math.isfinite(value):
        return str(value)
    scaled, suffix = value, ""
    for suffix in ("", "k", "M", "B", "T"):
        # 999.6 would round up to "1e+03": it belongs to the next suffix.
        if abs(scaled) < 999.5 or suffix == "T":
            break
        scaled /= 1000
    text = f"{scaled:.{digits}g}" if abs(scaled) < 1000 else f"{scaled:.0f}"
    return f"{text}{suffix}"


def size(num_bytes: float) -> str:
    """Returns a size in binary units: `512 B`, `3.4 MiB`, `12.1 GiB`.

    >>> size(512), size(3.5 * 2**20)
    ('512 B', '3.5 MiB')
    """
    scaled, unit = num_bytes, "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1024 or unit == "TiB":
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 100 else f"{scaled:.1f} {unit}"


def duration(seconds: float) -> str:
    """Returns a length of time: `0.4 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`.

    >>> duration(185), duration(7620)
    ('3 min 05 s', '2 h 07 min')
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for big, small, length, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= length:
            return f"{whole // length} {big} {whole % length // part:02d} {small}"
    return f"{whole} s"


def number(value: object, digits: int = 4) -> str:
    """Returns a value for a table: at most `digits` significant digits for a float, everything else as it is.

    >>> number(0.000312345), number(3.14159265), number(1200), number(None)
    ('0.0003123', '3.142', '1,200', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value and not 1e-4 <= abs(value) < 1e7:
            return scientific(value, digits)
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def measured(value: object, digits: int = 4) -> str:
    """Returns a measured value with `digits` significant digits, zeros at the end kept: columns of them line up.

    >>> measured(1.74), measured(17.7), measured(27312.4), measured(None)
    ('1.740', '17.70', '27,312', '–')
    """
    if isinstance(value, float) and math.isfinite(value) and 1e-4 <= abs(value) < 10 ** (digits - 1):
        return f"{value:#.{digits}g}"
    if isinstance(value, float) and math.isfinite(value) and 10 ** (digits - 1) <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return number(value, digits)


def scientific(value: float, digits: int = 3) -> str:
    """Returns a small number such as a learning rate: `3e-4`, `1.25e-5`, `0`.

    >>> scientific(0.0003), scientific(1.25e-5), scientific(0.0)
    ('3e-4', '1.25e-5', '0')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"
