"""Reads generated masks as torch does and as the project does, on the machine of the fake driver; prints how many.

What torch reads otherwise is left out here and pinned in ``test_mask.py``: a sign without a number (``+``, ``-x``),
for which torch raises ValueError, and digits beyond ASCII, which C knows nothing of. For ``MIG-`` masks torch's NVML
count gives up (-1).
"""

from __future__ import annotations

import json
import os
from typing import cast

import torch.cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_accel.hardware.cuda import Cuda
from pytest_accel.hardware.mask import read_cuda_mask

UUIDS = torch.cuda._raw_device_uuid_nvml() or []
DEVICES = Cuda().discover()

numbers = st.integers(-2, len(UUIDS) + 1).map(str)
odd_numbers = st.sampled_from(["0x2", "1gpu2", "+1", "-0", "00", " 2 ", "3 1", "2-1", "99999", "", " ", "all", "gpu-1"])
ids = st.builds(lambda uuid, length: uuid[:length], st.sampled_from(UUIDS), st.integers(4, len(UUIDS[0])))
odd_ids = st.sampled_from(["GPU-", "GPU-zz", " GPU-1111", "MIG-1", "GPU"])
entries = st.one_of(numbers, numbers, numbers, odd_numbers, ids, ids, ids, odd_ids)
# Masks of one form are what people write, and reach further than mixed ones, which end early.
masks = st.one_of(*(st.lists(one, min_size=1, max_size=6) for one in (numbers, ids, entries, numbers | odd_numbers)))

compared = 0


def torch_sees(mask: str) -> list[int]:
    os.environ["CUDA_VISIBLE_DEVICES"] = mask
    parsed = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        seen = torch.cuda._transform_uuid_to_ordinals(parsed, UUIDS)
    else:
        numbers = cast("list[int]", parsed)
        beyond = [at for at, number in enumerate(numbers) if number >= len(UUIDS)]
        seen = numbers[: beyond[0]] if beyond else numbers
    assert torch.cuda._device_count_nvml() == len(seen)
    return seen


@settings(max_examples=300, deadline=None, database=None)
@given(st.lists(masks, min_size=10, max_size=10))
def compare(lists: list[list[str]]) -> None:
    global compared
    for entries in lists:
        mask = ",".join(entries)
        if not mask.startswith("MIG-"):
            compared += 1
            assert [device.index for device in read_cuda_mask(mask, DEVICES)] == torch_sees(mask), mask


assert [device.id for device in DEVICES] == UUIDS
compare()
print(json.dumps(compared))
