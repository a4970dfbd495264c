"""Copies of a slot's states, so that the engine may go on while they are parked."""

from __future__ import annotations

from typing import Any

from mmkv import device as cuda
from mmkv.buffer import Buffer, allocate_host, buffer_of
from mmkv.memory import SlotMemory

__all__ = ["states_aside"]


def states_aside(memory: SlotMemory, stream: Any) -> tuple[dict[str, Buffer], ...]:
    """The states of every layer, copied: on the host at once, on a device in the order of the producer's stream."""
    return tuple({name: _copied(buffer, stream) for name, buffer in layer.items()} for layer in memory.states)


def _copied(buffer: Buffer, stream: Any) -> Buffer:
    if buffer.device is not None:
        return cuda.copy_aside(buffer, stream)
    copy = buffer_of(allocate_host((buffer.bytes,), "uint8"))
    copy.host_view(0, copy.bytes)[:] = buffer.host_view(0, buffer.bytes)
    return copy
