"""How far computation has got, as far as copies have to wait for it."""

from __future__ import annotations

from runtime.device import COMPUTE, Event, Lane, Streams


class LastPoint:
    """The latest point in the lane of computation. As a context: copies begin together, and share one point.

    Only the training thread enters the context, with the lock of the pager held, and queues no stage within it. So nothing comes
    into the lane of computation meanwhile, but for the mover's own waits for copies. It tells of them by `passed`: memory that
    is freed after such a wait may serve the next copy in (rules 2 and 4). shares: False takes a point for each copy.
    """

    def __init__(self, streams: Streams, *, shares: bool = True) -> None:
        self._streams = streams
        self._shares = shares
        self._together = False
        self._event: Event | None = None
        self._held: set[Lane] = set()

    def __enter__(self) -> None:
        self._event, self._together = None, self._shares

    def __exit__(self, *_: object) -> None:
        self._event, self._together = None, False

    def passed(self) -> None:
        """Something was queued in the lane of computation."""
        self._event = None

    def event(self) -> Event:
        """Return the point after all computation that was queued so far."""
        if self._event is not None:
            return self._event
        event = self._streams.record(COMPUTE)
        self._held.clear()
        if self._together:
            self._event = event
        return event

    def hold(self, lane: Lane) -> bool:
        """Make what is queued in `lane` from now on wait for all computation that was queued so far.

        Returns False if it does so already: the last thing that was queued in the lane is a copy that has begun together with
        the next one.
        """
        if self._event is not None and lane in self._held:
            return False
        self._streams.wait(lane, self.event())
        self._held.add(lane)
        return True
