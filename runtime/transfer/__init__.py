"""Copies blocks between memory and stores: engines, links, their queues, and their measured rates."""

from runtime.transfer.engine import Engine, Ready, Transfer
from runtime.transfer.measurement import LinkRates
from runtime.transfer.storage_path import OpenEngine, PathCandidate, StoragePath, choose_path, cpu_candidates, open_path
from runtime.transfer.torch_memory import TorchMemory

__all__ = [
    "PathCandidate",
    "Engine",
    "LinkRates",
    "OpenEngine",
    "Ready",
    "StoragePath",
    "TorchMemory",
    "Transfer",
    "choose_path",
    "cpu_candidates",
    "open_path",
]
