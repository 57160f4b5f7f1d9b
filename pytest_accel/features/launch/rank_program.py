"""A program that a launcher starts as each rank: it becomes the script, with its output in files of the rank.

Launchers treat the output of ranks in their own ways: prefixes, folders, both streams in one file. With this program,
one way serves all: in the folder that the variable `FOLDER` names, ``N.out`` and ``N.err`` are the output of rank N,
and ``N.pid`` has its process id. Without the variable, as when a user repeats the command, nothing is redirected.
"""

import os
import sys

FOLDER = "PYTEST_ACCEL_LAUNCH_FOLDER"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
"""Variables of Open MPI, MPICH, Slurm, and of torchrun and DeepSpeed. accelerate sets none for a single process."""


def main() -> None:
    """Run the script in the arguments, or the module after ``-m``."""
    if folder := os.environ.pop(FOLDER, None):
        path = os.path.join(folder, next((os.environ[name] for name in _RANKS if name in os.environ), "0"))
        with open(f"{path}.pid", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        for target, stream in enumerate(("out", "err"), start=1):
            with open(f"{path}.{stream}", "ab") as output:  # A launcher may start a rank again.
                os.dup2(output.fileno(), target)
    arguments = sys.argv[1:]
    # DeepSpeed puts its --local_rank=N, which is for the script, before the script.
    own = [arguments.pop(0)] if arguments[0].startswith("--local_rank") else []
    end = 2 if arguments[0] == "-m" else 1
    python = sys.orig_argv[: -len(sys.argv)]  # With the launcher's flags, such as -u.
    os.execv(sys.executable, [*python, *arguments[:end], *own, *arguments[end:]])


if __name__ == "__main__":
    main()
