"""Displays in a terminal that an interrupt cannot leave half begun or half ended."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Protocol


class Display(Protocol):
    """What is shown for a while: rich's Progress, Live, Status."""

    def start(self) -> None:
        """Hides the cursor and begins."""

    def stop(self) -> None:
        """Ends, with the cursor back."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts an interrupt off to the end of a few instructions."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which gets no interrupts
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def shown(display: Display) -> Iterator[None]:
    """Shows something for as long as the context lasts."""
    try:
        with uninterrupted():
            display.start()
        yield
    finally:
        with uninterrupted():
            display.stop()
