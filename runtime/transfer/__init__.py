"""Copies between device and stores: links, their queues, their measured rates."""

from runtime.transfer.engine import Engine, Ready, Transfer
from runtime.transfer.measurement import LinkRates
from runtime.transfer.storage_path import Candidate, OpenEngine, StoragePath, choose_path, cpu_candidates, open_path
from runtime.transfer.torch_memory import TorchMemory

__all__ = [
    "Candidate",
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
