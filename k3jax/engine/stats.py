"""What an engine says of itself."""

from __future__ import annotations

import dataclasses
import threading
from types import TracebackType
from typing import Any

import jax


@dataclasses.dataclass
class Stats:
    """Counts since the engine began; slots and pages as they are now."""

    requests: int = 0  # that ended, each sample one
    errors: int = 0  # of these
    tokens: int = 0  # generated
    prompt_tokens: int = 0  # of requests that began, again after each preemption
    seconds: float = 0.0  # in steps and in warm(), compiling included
    running: int = 0
    waiting: int = 0
    slots: int = 0  # KDA states, snapshots included
    slots_used: int = 0
    pages: int = 0  # of latents
    pages_used: int = 0
    snapshots: int = 0  # prefixes that are held
    prefix_hits: int = 0  # requests that went on from one
    reused_tokens: int = 0  # that they did not compute
    compiles: int = 0  # programs made, from the cache on disk or anew
    compile_seconds: float = 0.0
    preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, without the time that compiling took."""
        seconds = self.seconds - self.compile_seconds
        return self.tokens / seconds if seconds > 0 else 0.0


_COMPILING = "/jax/core/compile/"
_BACKEND = _COMPILING + "backend_compile_duration"


class Compiles:
    """Counts what a thread compiles while it is entered."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        _listen()
        _open().append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open().remove(self)


def _note(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith(_COMPILING):
        for compiles in _open():
            compiles.seconds += duration_secs
            compiles.count += event == _BACKEND


_thread = threading.local()
_listening = False


def _open() -> list[Compiles]:
    """What counts in this thread."""
    if not hasattr(_thread, "open"):
        _thread.open = []
    return _thread.open


def _listen() -> None:
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_note)
        _listening = True
