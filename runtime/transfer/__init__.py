"""Copies blocks between memory and stores: engines, links, their queues, and their measured rates."""

from runtime.transfer.engine import Engine, LinkRates, OneWay, TorchMemory, aligned
from runtime.transfer.link import Ready, Transfer
from runtime.transfer.storage_path import OpenEngine, PathCandidate, StoragePath, choose_path, cpu_candidates, open_path
