"""Which of the job's processes this is, told by the launcher's environment.

    rank()          # 0 in a single process, RANK under torchrun

No process group is asked: a tool that talks to other ranks can hang them.
"""

from __future__ import annotations

import os

# torchrun and Accelerate; Slurm; Open MPI; MPICH and Intel MPI.
_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank() -> int:
    """Return this process's rank, 0 when no launcher says otherwise."""
    for variable in _VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return 0
