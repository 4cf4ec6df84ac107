"""The rate of each link as the migration engine measured it for the trace, over the raw rate.

Raw rates: one large copy between pinned host memory and the device; direct I/O between host memory and the drives.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.alone import Missing, Runner, speed
from benchmarks.engine import DIRECTIONS, SLOT_BYTES, SLOTS, THREADS, raw, store_and_memory
from benchmarks.gpu_budgets import PERCENTS, TIERS, budgeted, sizes, unconstrained_peak
from benchmarks.results import Figure

COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
TRIALS = 7


def measure(runner: Runner) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return the rates of each link and their ratio, and the raw rates of all trials."""
    samples = raw_copies(runner.scale.device) | raw_files(runner.scale.output, runner.scale.rounds)
    engine, figures = engine_rates(runner)
    for link, rates in samples.items():
        best = median(rates)
        figures.append(Figure(name=f"raw, {link}", value=best / 1e9, unit="GB/s"))
        rate = engine.get(link)
        ratio = None if rate is None else rate / best
        note = "no trace has this link" if rate is None else f"{rate / 1e9:.4g} GB/s"
        figures.append(Figure(name=f"engine / raw, {link}", value=ratio, unit="", aim=">= 0.95", note=note))
    return tuple(figures), samples


def engine_rates(runner: Runner) -> tuple[dict[str, float], list[Figure]]:
    """Return bytes per second by link, from the traces of trainings, and a figure for each training that did not run.

    Trainings under half of the peak come first, since other parts need them too. If they are refused, the whole peak is tried.
    """
    rates: dict[str, float] = {}
    missing = []
    size = sizes(runner.scale)[0]
    peak = unconstrained_peak(runner, size)
    lacking = {"host", "storage"}
    for percent, tiers in product((PERCENTS[0], 100), TIERS):
        if not lacking & set(tiers.split()):
            continue
        outcome = budgeted(runner, size, peak, percent, tiers)
        if isinstance(outcome, Missing):
            missing.append(speed(f"{size}, {percent} %, {tiers}", outcome))
        elif outcome.trace is not None:
            rates |= {link.name: link.bytes_per_second for link in outcome.trace.hardware.links}
            lacking -= set(tiers.split())
    return rates, missing


def raw_copies(device: str) -> dict[str, list[float]]:
    """Return bytes per second of copies between pinned host memory and the device; on CPU within main memory."""
    on_gpu = device == "cuda"
    host = torch.ones(COPY_BYTES[device], dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {}
    for trial in range(TRIALS + 1):
        for link, target, source in (("device->host", host, there), ("host->device", there, host)):
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            rate = COPY_BYTES[device] / (time.perf_counter() - started)
            if trial:  # the first one is slower
                found.setdefault(link, []).append(rate)
    if on_gpu:
        del there, target, source
        torch.cuda.empty_cache()  # trainings may follow
    return found


def raw_files(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return bytes per second of direct I/O between host memory and files in `folder`, with the engine's number of threads."""
    total = SLOT_BYTES * SLOTS
    found: dict[str, list[float]] = {}
    with store_and_memory(folder) as (_, slots, address), ThreadPoolExecutor(THREADS) as pool:
        transfer = raw(slots, address, pool)
        for turn in range(rounds + 1):
            for direction in DIRECTIONS:
                seconds = transfer(direction)
                if turn:  # the first turn allocates the file's blocks
                    found.setdefault(direction, []).append(total / seconds)
    return found
