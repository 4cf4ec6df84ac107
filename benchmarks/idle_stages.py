"""Stages that do nothing, straight under a pager: its share of what `idle_training` costs."""

from __future__ import annotations

import torch

from benchmarks.idle_plan import Life, host_tier, idle_pager, moves_of, need_bytes, size_bytes

STAGES = 400
_READS = 5


class IdleStages:
    """Iterations of STAGES stages over `blocks` blocks that last. Stages write the first ones in turns; the others wait away.

    moving: whether anything moves between its uses. moves: of the plan, in an iteration.
    """

    def __init__(self, blocks: int, *, moving: bool = True) -> None:
        used = min(blocks, STAGES * _READS)
        lives = [Life(size_bytes(number)) for number in range(used)]
        reads = [[(stage * _READS + number) % used for number in range(_READS)] for stage in range(STAGES)]
        for stage, read in enumerate(reads):
            for number in read:
                lives[number].uses.append(stage)
        self.moves = moves_of(lives, STAGES) if moving else []
        self._store = host_tier(blocks)
        self.pager, self._device = idle_pager(self._store)
        self._tensors = [torch.empty(size_bytes(number), dtype=torch.uint8) for number in range(blocks)]
        make = self.pager.block_of
        made = [make(t, name=f"b{n}", kind="parameter", user_visible=True) for n, t in enumerate(self._tensors)]
        self._reads = [[made[number] for number in read] for read in reads]
        until = used // _READS  # stages until a block is used again
        self._next_uses = [[(block, until) for block in read] for read in self._reads]
        self._fetch = [[made[m.block] for m in self.moves if m.fetch % STAGES == stage] for stage in range(STAGES)]
        self._leave = [[made[m.block] for m in self.moves if m.after == stage] for stage in range(STAGES)]
        self.pager.enter_region()
        for block in made[used:] if not moving else made:
            self.pager.offload(block)
        self.pager.leave_region()
        self.pager.account.budget_bytes = need_bytes(lives, self.moves, STAGES)
        self.iterate()

    def close(self) -> None:
        """Free the host tier."""
        self._store.close()

    def iterate(self) -> None:
        """Run one iteration: the calls that the executor and the recorder make for it."""
        pager = self.pager
        with pager.device.region():
            pager.enter_region()
            for number, read in enumerate(self._reads):
                pager.acquire(read, 0, "stage", then_fetch=self._fetch[number])
                self._device.stages += 1
                pager.retire(read, read)
                pager.advance_clock(self._next_uses[number])
                pager.offload_all([(block, "host") for block in self._leave[number]])
            pager.leave_region()
