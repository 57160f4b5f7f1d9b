"""Compare how torch and the plugin read generated masks, on the machine of the fake driver.

``python -m tests.hardware.compare_with_torch --masks 100000`` in the repository's root prints the result. The exit
status is 1 if there is a difference that `KNOWN` does not explain.
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
"""Function that generates one entry of a mask."""

VARIABLE = "CUDA_VISIBLE_DEVICES"
# Some ids have a common start, so that prefixes of ids are unique or ambiguous.
CARDS = [
    f"GPU-{start}-0000-0000-000000000000" for start in ("11110000", "11112222", "33330000", "33330001", "55550000")
]
INSTANCES = [f"MIG-{start}-0000-0000-000000000000" for start in ("aaaa0000", "aaaa0001", "bbbb0000")]
MACHINE = (
    *(f"gpu {card}" for card in CARDS),
    *(f"mig {slot} {instance} {2**30} x" for slot, instance in enumerate(INSTANCES)),
)
"""Equal cards, so that CUDA and NVML number them in the same order (by PCI address). The last card is in MIG mode."""

IN_PROCESS = """
import json
from tests.hardware.compare_with_torch import compare
print(json.dumps(compare({masks}, {seed})))
"""
"""Source of the process with the fake driver; format it with the arguments of `compare`."""

_WORDS = ("all", "none", "void", "NoDevFiles", "x", "gpu-1", "GPU", "MIG", "cuda:1", "0.", ".1", "*")
_BLANKS = (" ", "  ", "\t", "\n", "\u00a0")
_AFTER = ("x", "gpu2", " 1", "-1", "+2", ".5", "e3", "_0", ":0", "/1", "\u00b2", "\u0663")
_BEFORE = ("+", "-", "++", "--", "+-", "+ ", "0x", "0X", "#")
_NON_ASCII = ("\u00b2", "\u0663", "\uff11", "1\u00b2", "2\uff13", "-\u0661", "+\u00b3")
"""Digits that are not ASCII: superscript, Arabic-Indic, full width."""
_HUGE = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**64, 2**64 + 1, 10**19, 10**20, 10**21, 10**300)


@dataclass(frozen=True)
class Known:
    """An intended difference for masks of indices.

    `equivalent` turns an entry into one that torch reads as the plugin reads the original.
    """

    reason: str
    equivalent: Callable[[str], str]


KNOWN = (
    Known(
        "Python reads digits that are not ASCII; CUDA reads the mask in C, where they are no digits",
        lambda entry: "".join(char if char.isascii() or not char.isdigit() else "x" for char in entry),
    ),
    Known(
        "torch raises ValueError for a sign without a number; the plugin ends the list there, since it is no index",
        lambda entry: "x" if re.match(r"[+-](?![0-9])", entry.strip()) else entry,
    ),
    Known(
        "torch raises ValueError for more digits than int() accepts; such a number is out of range on every machine",
        lambda entry: re.sub(r"^(\s*[+-]?)0*([0-9]{640})[0-9]*", r"\1\2", entry),
    ),
)


def masks(random: Random) -> Iterator[str | None]:
    """Yield None (unset), an empty mask, and then random masks without end, with entries of one form or of several."""
    yield from (None, "")
    forms: list[Entry] = [_index, _odd_index, _card, _instance]
    kinds: list[list[Entry]] = [[_index], [_index, _odd_index], [_card], [_instance], forms, forms]
    while True:
        chosen = random.choice(kinds)
        entries: list[str] = []
        for _ in range(random.choice([1, 2, 2, 3, 3, 4, 5, 7])):
            if entries and random.random() < 0.06:
                entries.append(_repeat(random, random.choice(entries)))
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
            return random.choice(_NON_ASCII)
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


def _repeat(random: Random, entry: str) -> str:
    """Return the same entry, or another spelling of the same number."""
    return random.choice([entry, entry, f"0{entry}", f" {entry}", f"+{entry}", f"{entry}x"])


def compare(count: int, seed: int) -> dict[str, Any]:
    """Read `count` different masks in both ways, in a process that has the fake driver; return the result.

    `left` has the number of masks by the number of cards or instances that they leave, and `known` the number of times
    that each difference of `KNOWN` occurred. `unexplained` has each mask with another difference, and both readings.
    """
    read_as_torch, read_as_plugin = _torch_reader(), _plugin_reader()
    left: Counter[str] = Counter()
    known = dict.fromkeys((one.reason for one in KNOWN), 0)
    unexplained: list[tuple[str | None, list[str], list[str] | str]] = []
    start = time.perf_counter()
    for mask in _different(masks(Random(seed)), count):
        actual, expected = read_as_plugin(mask), read_as_torch(mask)
        if actual == expected:
            left[str(len(expected))] += 1
            continue
        equivalent, reasons = _equivalent(mask)
        expected = read_as_torch(equivalent) if reasons else expected
        if actual == expected:
            for reason in reasons:
                known[reason] += 1
        else:
            unexplained.append((mask, actual, expected))
    seconds = round(time.perf_counter() - start, 1)
    return {"masks": count, "left": left, "known": known, "unexplained": unexplained, "seconds": seconds}


def _different(found: Iterator[str | None], count: int) -> Iterator[str | None]:
    seen: set[str | None] = set()
    while len(seen) < count:
        mask = next(found)
        if mask not in seen:
            seen.add(mask)
            yield mask


def _equivalent(mask: str | None) -> tuple[str | None, list[str]]:
    """Return a mask that torch reads as the plugin reads `mask`, and the reasons of `KNOWN` for changing it."""
    reasons: list[str] = []
    if mask is None or mask.startswith(("GPU-", "MIG-")):
        return mask, reasons
    for one in KNOWN:
        equivalent = ",".join(one.equivalent(entry) for entry in mask.split(","))
        reasons += [one.reason] if equivalent != mask else []
        mask = equivalent
    return mask, reasons


def _plugin_reader() -> Callable[[str | None], list[str]]:
    vendor = Cuda()
    devices = vendor.discover()

    def read(mask: str | None) -> list[str]:
        return [device.id for device in vendor.visible(devices, {} if mask is None else {VARIABLE: mask})]

    assert sorted(read(None)) == sorted([*CARDS[:-1], *INSTANCES])
    return read


def _torch_reader() -> Callable[[str | None], list[str] | str]:
    """Return a function that reads a mask with torch: it returns the ids that the mask leaves, or "ValueError".

    The ids of its instances replace that of the card in MIG mode.
    """
    import torch.cuda

    # The driver's answers do not depend on the mask, and take longer than everything else.
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
            out_of_range = [at for at, number in enumerate(numbers) if number >= len(CARDS)]
            seen = [CARDS[number] for number in (numbers[: out_of_range[0]] if out_of_range else numbers)]
        elif parsed[0].startswith("MIG-"):
            # torch does not count MIG instances, but translates their ids in the same way.
            assert counted == -1
            return [INSTANCES[at] for at in torch.cuda._transform_uuid_to_ordinals(parsed, INSTANCES)]
        else:
            seen = [CARDS[at] for at in torch.cuda._transform_uuid_to_ordinals(parsed, CARDS)]
        assert counted == len(seen), mask
        return [name for card in seen for name in (INSTANCES if card == CARDS[-1] else [card])]

    return read


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.compare_with_torch", description=__doc__)
    parser.add_argument("--masks", type=int, default=100_000, help="number of different masks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator (default: %(default)s)")
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
