"""Parsers of AMD's visibility masks, one for each layer of ROCm's runtimes.

Sources: ROCR ``core/runtime/amd_filter_device.cpp``, clr ``rocclr/device/rocm/rocdevice.cpp`` (snapshots of 2024-10).
This module has not been tested on an AMD GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STRTOL = re.compile(r"0[xX][0-9a-fA-F]+|0[0-7]+|0|[1-9][0-9]*", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_DIGITS = 18
"""Maximum number of digits of an index, few enough for `int`."""


def read_rocr(text: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Return what ``ROCR_VISIBLE_DEVICES=text`` leaves, as positions in `ids`, which are in KFD's node order.

    Indices (``strtol`` with base 0, blanks around them allowed) and ``GPU-`` ids (any case, 5 to 20 characters, a
    prefix of exactly one id) may be mixed. An entry that is invalid, out of range or a repetition ends the list; the
    entries before it count. The empty string leaves nothing.
    """
    chosen: list[int] = []
    for entry in text.split(","):
        token = entry.strip()
        if token.upper().startswith("GPU-"):
            fits = [at for at, name in enumerate(ids) if name.upper().startswith(token.upper())]
            at = fits[0] if len(fits) == 1 and 5 <= len(token) <= 20 else None
        else:
            at = _strtol(token)
        if at is None or at >= len(ids) or at in chosen:
            break
        chosen.append(at)
    return tuple(chosen)


def read_hip(text: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Return what ``HIP_VISIBLE_DEVICES=text`` (or ``CUDA_``) leaves, as positions in `ids`, the devices left by ROCR.

    An index is a decimal number without blanks or leading zeros; an entry with ``GPU-`` means the first id that
    contains it, in the same case. A repetition is ignored; an entry that is invalid or out of range ends the list. The
    empty string leaves nothing.
    """
    chosen: list[int] = []
    for entry in text.split(","):
        if "GPU-" in entry:
            at = next((at for at, name in enumerate(ids) if entry in name), None)
        else:
            at = int(entry) if _DECIMAL.fullmatch(entry) and len(entry) <= _DIGITS else None
        if at is None or at >= len(ids):
            break
        if at not in chosen:
            chosen.append(at)
    return tuple(chosen)


def _strtol(token: str) -> int | None:
    if not _STRTOL.fullmatch(token) or len(token) > _DIGITS:
        return None
    octal = len(token) > 1 and token[0] == "0" and token[1] not in "xX"
    return int(token, 8 if octal else 0)
