"""Copies blocks between memory and stores: engines, links, their queues, and their measured rates."""

from runtime.transfer.engine import Engine, LinkRates, OneWay, TorchMemory, aligned
from runtime.transfer.link_queue import Ready, Transfer
from runtime.transfer.path_choice import OpenEngine, PathCandidate, StoragePath, choose_path, cpu_candidates, open_path
