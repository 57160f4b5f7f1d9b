"""The slots that DeepSpeed's launcher is to use, in the one form that it takes: a mask of integers."""

from __future__ import annotations

from pytest_accel.launch.job import Job

_FAR = 1000
"""More than any machine has accelerators."""


def visible_slots(job: Job) -> dict[str, str]:
    """The variables by which DeepSpeed starts one rank for each of the job's devices, and for nothing else.

    DeepSpeed reads the mask of its accelerator when it is given no flag that says which devices, turns the entries into
    integers, sorts them, and gives all ranks the mask that comes of it (``launcher/runner.py``, ``parse_node_config``).

    Its CPU accelerator does that with ``CUDA_VISIBLE_DEVICES`` as well, and would so show the first GPUs to CPU ranks:
    hence numbers that no GPU has. How many slots the machine has is what ``LOCAL_SIZE`` says
    (``accelerator/cpu_accelerator.py``).

    ValueError where the devices cannot be named so, or where there is not one for each rank.
    """
    if not job.accelerated:
        slots = range(_FAR, _FAR + job.nproc)
        return {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots)),
            "LOCAL_SIZE": str(slots.stop),
        }
    if job.nproc != len(job.devices):
        raise ValueError(
            f"launch(launcher='deepspeed', nproc={job.nproc}): DeepSpeed starts one rank for each device that it sees, "
            f"and the test has {len(job.devices)}; allowed is nproc={len(job.devices)}"
        )
    if job.kind == "cuda":
        parts = [device.id for device in job.devices if device.parent is not None]
        if parts:
            raise ValueError(
                f"launch(launcher='deepspeed'): DeepSpeed names devices by integers, which {', '.join(parts)} has none "
                "of: use torchrun for MIG instances"
            )
        # In PCI order CUDA counts as the management library does, whose number `index` is.
        numbers = ",".join(str(device.index) for device in sorted(job.devices, key=lambda device: device.index))
        return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if job.kind == "rocm":
        # HIP's own mask wins over the one that DeepSpeed sets, or counts within ROCR's, as DeepSpeed's then does.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(job.devices))))}
    name = next((name for name in job.mask_variables if name in job.environ), None)
    mask = "" if name is None else job.environ[name]
    if name is not None and not all(entry.strip().isdecimal() for entry in mask.split(",")):
        raise ValueError(
            f"launch(launcher='deepspeed'): {name}={mask!r}: DeepSpeed takes integers with commas between them only"
        )
    return {}
