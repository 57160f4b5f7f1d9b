"""Reads generated masks as torch does and as the project does, on the machine of the fake driver.

``python -m tests.hardware.compare_with_torch --masks 100000`` in the repository's root prints what came of it, and ends
with 1 if a mask was read otherwise than torch reads it and `KNOWN` does not say why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, cast

from pytest_accel.hardware.vendors.cuda import Cuda
from tests.hardware import fake_driver

Entry = Callable[[Random], str]
"""Makes an entry of a mask."""

VARIABLE = "CUDA_VISIBLE_DEVICES"
# Two pairs of cards and two instances start alike, so that prefixes are unique, ambiguous and repeated.
CARDS = [
    f"GPU-{start}-0000-0000-000000000000" for start in ("11110000", "11112222", "33330000", "33330001", "55550000")
]
INSTANCES = [f"MIG-{start}-0000-0000-000000000000" for start in ("aaaa0000", "aaaa0001", "bbbb0000")]
MACHINE = (
    *(f"gpu {card}" for card in CARDS),
    *(f"mig {slot} {instance} {2**30} x" for slot, instance in enumerate(INSTANCES)),
)
"""All alike, so that indices count by PCI for CUDA as for NVML; the last card is in MIG mode."""

IN_PROCESS = """
import json
from tests.hardware.compare_with_torch import compare
print(json.dumps(compare({masks}, {seed})))
"""
"""The source that a process with the fake driver runs; braces for the arguments of `compare`."""

_WORDS = ("all", "none", "void", "NoDevFiles", "x", "gpu-1", "GPU", "MIG", "cuda:1", "0.", ".1", "*")
_BLANKS = (" ", "  ", "\t", "\n", "\u00a0")
_AFTER = ("x", "gpu2", " 1", "-1", "+2", ".5", "e3", "_0", ":0", "/1", "\u00b2", "\u0663")
_BEFORE = ("+", "-", "++", "--", "+-", "+ ", "0x", "0X", "#")
_BEYOND = ("\u00b2", "\u0663", "\uff11", "1\u00b2", "2\uff13", "-\u0661", "+\u00b3")
"""Digits beyond ASCII: superscripts, Arabic-Indic, full width."""
_HUGE = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**64, 2**64 + 1, 10**19, 10**20, 10**21, 10**300)


@dataclass(frozen=True)
class Known:
    """Masks of indices that torch reads otherwise, on purpose; `alike` makes of an entry one that it reads as we do."""

    reason: str
    alike: Callable[[str], str]


KNOWN = (
    Known(
        "a digit beyond ASCII is one for Python, and no digit for C, in which CUDA reads the mask",
        lambda entry: "".join(char if char.isascii() or not char.isdigit() else "x" for char in entry),
    ),
    Known(
        "for a sign without a number torch raises ValueError; it is no index, and the list ends",
        lambda entry: "x" if re.match(r"[+-](?![0-9])", entry.strip()) else entry,
    ),
    Known(
        "torch raises ValueError for more digits than int() reads; 640 of them are out of range on every machine",
        lambda entry: re.sub(r"^(\s*[+-]?)0*([0-9]{640})[0-9]*", r"\1\2", entry),
    ),
)


def masks(random: Random) -> Iterator[str | None]:
    """Unset, empty, then without end: of one form, which is what people write and reaches far, or of several."""
    yield from (None, "")
    forms: list[Entry] = [_index, _odd_index, _card, _instance]
    kinds: list[list[Entry]] = [[_index], [_index, _odd_index], [_card], [_instance], forms, forms]
    while True:
        chosen = random.choice(kinds)
        entries: list[str] = []
        for _ in range(random.choice([1, 2, 2, 3, 3, 4, 5, 7])):
            if entries and random.random() < 0.06:
                entries.append(_again(random, random.choice(entries)))
            else:
                entries.append(random.choice(chosen)(random))
        yield ",".join(entries)


def _index(random: Random) -> str:
    return str(random.randint(-1 if random.random() < 0.1 else 0, len(CARDS) + 1))


def _odd_index(random: Random) -> str:
    number = str(random.randint(0, len(CARDS)))
    match random.randrange(9):
        case 0:
            return random.choice(_BEFORE) + random.choice([number, "", "x"])
        case 1:
            return number + random.choice(_AFTER)
        case 2:
            return random.choice(["", *_BLANKS]) + number + random.choice(_BLANKS)
        case 3:
            return random.choice(["", "+", "-"]) + "0" * random.choice([1, 2, 3, 19, 20, 30, 700]) + number
        case 4:
            return random.choice(["", "+", "-"]) + str(random.choice(_HUGE) + random.randint(-1, 1))
        case 5:
            return random.choice(["", *_BLANKS, *_WORDS])
        case 6 if random.random() < 0.3:
            return random.choice(_BEYOND)
        case 7 if random.random() < 0.02:
            return random.choice(["", "-", " "]) + random.choice("019") * random.choice([640, 641, 4300, 4301, 5000])
    return number


def _card(random: Random) -> str:
    return _identity(random, CARDS, ("GPU-", "GPU-9", "GPU-zz", "gpu-1111", f"{CARDS[0]}0", "GPU-1111-", "GPU--1"))


def _instance(random: Random) -> str:
    odd = ("MIG-", "MIG-9", "mig-aaaa0000", f"{INSTANCES[0]}0", f"MIG-{CARDS[-1]}/1/0", "MIG-GPU-")
    return _identity(random, INSTANCES, odd)


def _identity(random: Random, ids: Sequence[str], odd: Sequence[str]) -> str:
    name = random.choice(ids)
    match random.randrange(12):
        case 0:
            return random.choice(odd)
        case 1:
            return random.choice([f" {name}", f"{name} ", name.upper(), name[4:]])
        case 2 | 3:
            return name[: random.randint(4, 12)]
        case 4 | 5 | 6 | 7:
            return name[: random.randint(12, len(name))]
    return name


def _again(random: Random, entry: str) -> str:
    """The same entry, or another spelling of the same number."""
    return random.choice([entry, entry, f"0{entry}", f" {entry}", f"+{entry}", f"{entry}x"])


def compare(count: int, seed: int) -> dict[str, Any]:
    """Reads `count` masks, all different, both ways; call it in a process that has the fake driver.

    `left` says how many masks leave so many cards or instances, `known` how often each difference in `KNOWN` was met,
    `unexplained` is the mask and both readings where they differ.
    """
    theirs, ours = _theirs(), _ours()
    left: Counter[str] = Counter()
    known = dict.fromkeys((one.reason for one in KNOWN), 0)
    unexplained: list[tuple[str | None, list[str], list[str] | str]] = []
    began = time.perf_counter()
    for mask in _different(masks(Random(seed)), count):
        mine, expected = ours(mask), theirs(mask)
        if mine == expected:
            left[str(len(expected))] += 1
            continue
        alike, reasons = _alike(mask)
        expected = theirs(alike) if reasons else expected
        if mine == expected:
            for reason in reasons:
                known[reason] += 1
        else:
            unexplained.append((mask, mine, expected))
    seconds = round(time.perf_counter() - began, 1)
    return {"masks": count, "left": left, "known": known, "unexplained": unexplained, "seconds": seconds}


def _different(found: Iterator[str | None], count: int) -> Iterator[str | None]:
    seen: set[str | None] = set()
    while len(seen) < count:
        mask = next(found)
        if mask not in seen:
            seen.add(mask)
            yield mask


def _alike(mask: str | None) -> tuple[str | None, list[str]]:
    """The mask as torch reads it like us, and the reasons that made it another; itself where there is none."""
    reasons: list[str] = []
    if mask is None or mask.startswith(("GPU-", "MIG-")):
        return mask, reasons
    for one in KNOWN:
        alike = ",".join(one.alike(entry) for entry in mask.split(","))
        reasons += [one.reason] if alike != mask else []
        mask = alike
    return mask, reasons


def _ours() -> Callable[[str | None], list[str]]:
    vendor = Cuda()
    devices = vendor.discover()

    def read(mask: str | None) -> list[str]:
        return [device.id for device in vendor.visible(devices, {} if mask is None else {VARIABLE: mask})]

    assert sorted(read(None)) == sorted([*CARDS[:-1], *INSTANCES])
    return read


def _theirs() -> Callable[[str | None], list[str] | str]:
    """Torch's reading: the ids of what it leaves, a card in MIG mode standing for its instances, or what it raises."""
    import torch.cuda

    # What the driver has is the same for every mask, and asking it takes longer than everything else.
    for name in ("_raw_device_uuid_nvml", "_raw_device_count_nvml"):
        setattr(torch.cuda, name, cache(getattr(torch.cuda, name)))
    assert torch.cuda._raw_device_uuid_nvml() == CARDS

    def read(mask: str | None) -> list[str] | str:
        os.environ.pop(VARIABLE, None)
        if mask is not None:
            os.environ[VARIABLE] = mask
        try:
            parsed = torch.cuda._parse_visible_devices()
        except ValueError:
            return "ValueError"
        counted = torch.cuda._device_count_nvml()
        if not parsed or isinstance(parsed[0], int):
            numbers = cast("list[int]", parsed)
            beyond = [at for at, number in enumerate(numbers) if number >= len(CARDS)]
            seen = [CARDS[number] for number in (numbers[: beyond[0]] if beyond else numbers)]
        elif parsed[0].startswith("MIG-"):
            # Its count gives up here; the rest of its reading works for instances as for cards.
            assert counted == -1
            return [INSTANCES[at] for at in torch.cuda._transform_uuid_to_ordinals(parsed, INSTANCES)]
        else:
            seen = [CARDS[at] for at in torch.cuda._transform_uuid_to_ordinals(parsed, CARDS)]
        assert counted == len(seen), mask
        return [name for card in seen for name in (INSTANCES if card == CARDS[-1] else [card])]

    return read


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.compare_with_torch", description=__doc__)
    parser.add_argument("--masks", type=int, default=100_000, help="how many, all different (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other masks (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accel-masks-") as folder:
        driver = Path(folder, "driver")
        fake_driver.build(driver / fake_driver.NVML, "libnvidia-ml.c")
        code = IN_PROCESS.format(masks=options.masks, seed=options.seed)
        found = fake_driver.run(driver, Path(folder, "machine.txt"), code, *MACHINE)
    print(json.dumps(found, indent=2))
    return int(bool(found["unexplained"]))


if __name__ == "__main__":
    sys.exit(main())
