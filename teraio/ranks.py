"""The ranks of one machine: where this process stands among them, what they tell each other, and what goes to the log.

They tell each other short texts in the store of torch.distributed. No collectives, which would have to be in the same order
everywhere. No call waits inside the store either: others use the same connection. A rank that waits looks again and again, and
gives up after a time with the numbers of those that it waits for.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.errors import OptionsError, RankError
from planner.schema import short_repr

if TYPE_CHECKING:  # options are read without torch
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("teraio")

_RANK = "{rank}"
_LOCAL_RANK = "{local_rank}"
_PREFIX = "teraio"
_LOOK_SECONDS = 0.02
_TELL_SECONDS = 30.0  # after so long the log says whom a rank waits for
_REMEDY = (
    "look at the output of these processes; if they train without teraio, or wait for what this rank computes first, as in "
    "pipeline parallelism, give local_ranks=1"
)
_FAILED = "failed"
_MAX_MESSAGE = 2000
_groups = itertools.count()  # each group of a process has keys of its own. All ranks make their groups in the same order.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """`rank` of `world_size` processes, and `local_rank` of the `local_world_size` among them that run on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def neighbours(self) -> range:
        """The ranks of this machine. torchrun gives those of one machine consecutive numbers."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def fill(self, text: str) -> str:
        """Return the text with the numbers of this rank in place of {rank} and {local_rank}."""
        return text.replace(_RANK, str(self.rank)).replace(_LOCAL_RANK, str(self.local_rank))


def rank_place() -> RankPlace:
    """Return the place that torchrun has given this process; the only rank where it did not start it.

    Raises OptionsError where the variables contradict each other.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return RankPlace()
    found = {}
    for field in ("rank", "world_size", "local_rank", "local_world_size"):
        text = os.environ.get(field.upper(), "")
        if re.fullmatch("[0-9]{1,9}", text) is None:
            raise OptionsError(
                f"environment variable {field.upper()}: found {short_repr(text)}, wanted a number; start with torchrun"
            )
        found[field] = int(text)
    place = RankPlace(**found)
    if not (place.local_rank < place.local_world_size <= place.world_size and place.local_rank <= place.rank < place.world_size):
        raise OptionsError(f"environment variables RANK and others contradict each other: {place}; start with torchrun")
    return place


class RankGroup:
    """The ranks of this machine that train together. For the training thread.

    `ranks`: their numbers, this one's among them. timeout_seconds: after which a rank that is waited for counts as gone.
    """

    def __init__(self, store: Store, place: RankPlace, *, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds
        self.rank = place.rank
        self.ranks = tuple(place.neighbours)

    # -- without waiting

    def tell(self, what: str, text: str) -> None:
        """Tell the others something; replaces what was told under this name before. Raises RankError if the store is gone."""
        self._asked(lambda: self._store.set(f"{what}/{self.rank}", text))

    def told(self, what: str, rank: int) -> str | None:
        """Return what a rank has told under a name; None if it has not. Raises RankError if the store is gone."""
        key = f"{what}/{rank}"
        if not self._asked(lambda: self._store.check([key])):
            return None
        return bytes(self._asked(lambda: self._store.get(key))).decode()

    def first(self, what: str) -> bool:
        """Return whether this rank is the first one that asks for `what`. Raises RankError if the store is gone."""
        return bool(self._asked(lambda: self._store.add(f"first/{what}", 1)) == 1)

    def call(self, what: str) -> None:
        """Let the others find `what` with `called`. Raises RankError if the store is gone."""
        self._asked(lambda: self._store.set(f"called/{what}", ""))

    def called(self, what: str) -> bool:
        """Return whether a rank, perhaps this one, has called for `what`. Raises RankError if the store is gone."""
        return bool(self._asked(lambda: self._store.check([f"called/{what}"])))

    def fail(self, problem: str) -> None:
        """Tell the others that this rank cannot go on, so that none waits for it."""
        try:
            self.tell(_FAILED, problem[:_MAX_MESSAGE])
        except RankError as error:
            logger.warning("the other ranks could not be told of a failure: %s", error)

    # -- with waiting

    def gather(self, what: str, text: str = "") -> dict[int, str]:
        """Tell something and wait until all ranks have told theirs. Return all texts, by rank.

        Raises RankError if a rank fails, or does not come in time.
        """
        self.tell(what, text)
        return {rank: self._wait_for(what, rank) for rank in self.ranks}

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Let the ranks run the block one after the other. Raises RankError as `gather` does."""
        for rank in self.ranks[: self.ranks.index(self.rank)]:
            self._wait_for(what, rank)
        yield
        self.tell(what, "")

    @contextmanager
    def failing_together(self, restart: type[Exception] = RankError) -> Iterator[None]:
        """If the block raises, tell the others, so that they fail as well instead of waiting.

        restart: what says that the block is to run again, on all ranks.
        """
        try:
            yield
        except (RankError, restart):
            raise  # they know, or nothing has failed
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def _wait_for(self, what: str, rank: int) -> str:
        begun, silent = time.monotonic(), True
        while (text := self.told(what, rank)) is None:
            for other in self.ranks:
                if other != self.rank and (problem := self.told(_FAILED, other)) is not None:
                    raise RankError(f"rank {other} of this machine cannot train, so rank {self.rank} does not either: {problem}")
            waited = time.monotonic() - begun
            if waited > self._timeout_seconds:
                whom = self._missing(what)
                raise RankError(f"rank {self.rank} has waited {self._timeout_seconds:.0f} s for {whom}: {_REMEDY}")
            if silent and waited > _TELL_SECONDS:
                silent = False
                whom, most = self._missing(what), self._timeout_seconds
                logger.warning("waiting for %s, at most %.0f s: %s", whom, most, _REMEDY)
            time.sleep(_LOOK_SECONDS)
        return text

    def _missing(self, what: str) -> str:
        """Return whom it waits for, in words."""
        missing = [str(rank) for rank in self.ranks if self.told(what, rank) is None]
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of this machine ({what})"

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:  # of torch.distributed, such as DistNetworkError
            raise RankError(
                f"rank {self.rank} lost the store of torch.distributed, which another process held: {error}; look at "
                "the output of that process"
            ) from error


def open_group(local_ranks: int, *, timeout_seconds: float) -> RankGroup | None:
    """Return the group of the ranks that torchrun has started on this machine.

    local_ranks: how many they are, as the user says. timeout_seconds: see `RankGroup`.
    None if there is only this one, or if torchrun says another number. Also if torch.distributed has no process group yet:
    nothing is agreed on then, and the log says so.
    """
    place = rank_place()
    if place.local_world_size == 1 or local_ranks != place.local_world_size:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        logger.warning(
            "torch.distributed has no process group, so the %d ranks of this machine cannot agree on anything; call "
            "torch.distributed.init_process_group before the first call of a compiled model",
            place.local_world_size,
        )
        return None
    from torch.distributed import distributed_c10d  # not every build of torch has it

    store = distributed_c10d.PrefixStore(f"{_PREFIX}/{next(_groups)}/", distributed_c10d._get_default_store())
    return RankGroup(store, place, timeout_seconds=timeout_seconds)


class _FirstRankInforms(logging.Filter):
    """Lets information pass on rank 0 only, and names the rank in all other messages."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__()
        self._rank = place.rank

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return self._rank == 0 or record.levelno < logging.INFO
        record.msg = f"rank {self._rank}: {record.msg}"
        return True


def only_first_rank_informs(logger: logging.Logger, place: RankPlace) -> None:
    """Let the logger inform on rank 0 only, if there are several ranks. May be called again."""
    if place.world_size > 1 and not any(isinstance(each, _FirstRankInforms) for each in logger.filters):
        logger.addFilter(_FirstRankInforms(place))
