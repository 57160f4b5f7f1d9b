"""A script for all launchers: sums the ranks' numbers over gloo; prints the sum, its arguments and environment."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

for name, others in {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
}.items():
    found = [os.environ[other] for other in others if other in os.environ]
    if found:  # mpirun and srun set their own variables only.
        os.environ[name] = found[0]

total = torch.tensor([float(os.environ.get("RANK", "0"))])
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    dist.all_reduce(total)
    dist.destroy_process_group()
print(json.dumps({"total": total.item(), "arguments": sys.argv[1:], "environment": dict(os.environ)}))
print(f"rank {os.environ.get('RANK', '0')} is done", file=sys.stderr)
