"""A program in a terminal of its own, for tests."""

import codecs
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time


class Terminal:
    """`python -m MODULE ARGUMENTS` with a terminal for all its streams."""

    def __init__(self, *argv: str):
        self._controller, terminal = os.openpty()
        self._before = termios.tcgetattr(self._controller)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(terminal)  # the program alone has it: when it ends, so does its output
        self.shown = ""  # all of it
        self._read = 0  # what was waited for
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._controller)

    def wait_for(self, pattern: str, seconds: float = 120.0) -> None:
        """Waits until the program shows a pattern, behind what was waited for before."""
        end = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.shown, self._read)):
            assert self._take(end), self.shown
        self._read = found.end()

    def _take(self, end: float) -> bool:
        """Reads what is shown next, until `end` at most; False if there is no more."""
        left = max(end - time.monotonic(), 0.0)
        ready, _, _ = select.select([self._controller], [], [], left)
        try:
            raw = os.read(self._controller, 65536) if ready else b""
        except OSError:  # nobody has the terminal open
            raw = b""
        self.shown += self._decode(raw)
        return bool(raw)

    def type(self, text: str) -> None:
        """Types."""
        os.write(self._controller, text.encode())

    def ctrl_c(self) -> None:
        """Interrupts the program."""
        self._process.send_signal(signal.SIGINT)

    def ctrl_c_until(self, pattern: str, tries: int = 10) -> None:
        """Interrupts a program that reads a line, as a user would: again if it is deaf.

        A signal between readline's prompt and its waiting for a key is lost.
        """
        for left in reversed(range(tries)):
            self.ctrl_c()
            try:
                return self.wait_for(pattern, seconds=5.0)
            except AssertionError:
                if not left:
                    raise

    def end(self, seconds: float = 120.0) -> int:
        """Waits for the end: the exit code, once all is shown."""
        end = time.monotonic() + seconds
        while self._take(end):
            pass
        return self._process.wait(max(end - time.monotonic(), 0.1))

    @property
    def is_clean(self) -> bool:
        """Whether modes and cursor are as they were."""
        hidden = self.shown.rfind("\x1b[?25l") > self.shown.rfind("\x1b[?25h")
        return not hidden and termios.tcgetattr(self._controller) == self._before
