"""Symmetric memory of the processes of an MPI job: ``mpiexec -n 2 python symmetric_mpi.py``; see ``--help``."""

from all_gather import all_gather, options
from mpi4py import MPI

from streamalloc.ipc import as_communicator

if __name__ == "__main__":
    all_gather(as_communicator(MPI.COMM_WORLD), options())
