"""Imported in the process that forks the ranks, so that each rank has torch and its parts for several processes."""

from maxmoe._torch import import_distributed

import_distributed()
