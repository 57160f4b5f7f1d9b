"""The device mask for DeepSpeed's launcher, which accepts only integers."""

from __future__ import annotations

from pytest_accel.features.launch.job import Job

_FIRST_CPU_SLOT = 1000
"""A number larger than that of any accelerator."""


def visible_slots(job: Job) -> dict[str, str]:
    """Return the variables that make DeepSpeed start one rank for each of the job's devices.

    Without a flag that selects devices, DeepSpeed reads the mask of its accelerator, converts the entries to integers,
    sorts them, and gives all ranks the resulting mask (``launcher/runner.py``, ``parse_node_config``).

    DeepSpeed's CPU accelerator uses ``CUDA_VISIBLE_DEVICES``, too, and would show the first GPUs to CPU ranks. So the
    mask for CPU ranks has numbers that no GPU has. ``LOCAL_SIZE`` is the number of slots of the machine
    (``accelerator/cpu_accelerator.py``).

    Raise ValueError if the devices cannot be named by integers, or if there is not one device for each rank.
    """
    if not job.accelerated:
        slots = range(_FIRST_CPU_SLOT, _FIRST_CPU_SLOT + job.nproc)
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
                f"launch(launcher='deepspeed'): DeepSpeed selects devices by integers, and MIG instances have none "
                f"({', '.join(parts)}): use torchrun"
            )
        # With PCI_BUS_ID, CUDA numbers devices as the management library does, which is where `index` comes from.
        numbers = ",".join(str(device.index) for device in sorted(job.devices, key=lambda device: device.index))
        return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if job.kind == "rocm":
        # HIP's own mask, if set, wins over DeepSpeed's. If it is not set, DeepSpeed's numbers count within ROCR's mask.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(job.devices))))}
    name = next((name for name in job.mask_variables if name in job.environ), None)
    mask = "" if name is None else job.environ[name]
    if name is not None and not all(entry.strip().isdecimal() for entry in mask.split(",")):
        raise ValueError(
            f"launch(launcher='deepspeed'): {name}={mask!r}: DeepSpeed accepts only integers with commas between them"
        )
    return {}
