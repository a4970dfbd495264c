"""What users would pick instead of a pool: a file for each conversation, with the libraries that save tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import Memory, PlaneRows
from benchmarks.work import Ids

__all__ = ["SAVERS", "FastSafetensors", "Safetensors", "TorchSave"]


class _Saver:
    """One file a conversation. A subclass writes and reads it.

    Parameters
    ----------
    directory : Path
        Where the files go.
    memory : Memory
        What the slot lies in.
    rows : sequence of PlaneRows
        The slot's arrays.
    tokens : int
        Rows of the conversation.
    """

    name = ""
    path = ""
    needs: tuple[str, ...] = ()

    def __init__(self, directory: Path, memory: Memory, rows: Sequence[PlaneRows], tokens: int) -> None:
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} cannot be imported")
        import torch

        self._torch = torch
        self._directory = directory
        self._memory = memory
        directory.mkdir(parents=True, exist_ok=True)
        self._tensors = {f"{plane.layer}.{plane.name}": _tensor(torch, plane)[:tokens] for plane in rows}

    @property
    def _device(self) -> str:
        return self._memory.device

    def _file(self, conversation: str) -> Path:
        return self._directory / f"{conversation}.{self.name}"

    def park(self, conversation: str, token_ids: Ids) -> None:  # noqa: ARG002
        self._save(self._tensors, self._file(conversation))

    def settle(self) -> None:
        pass

    def take(self, conversation: str) -> float | None:
        self._load(self._file(conversation), lambda name, tensor: self._tensors[name].copy_(tensor))
        self._memory.synchronize()
        return None

    def drop(self, conversation: str) -> None:
        self._file(conversation).unlink(missing_ok=True)

    def close(self) -> None:
        self._tensors.clear()
        if self._memory.on_device:
            self._torch.cuda.empty_cache()

    def _save(self, tensors: Mapping[str, Any], path: Path) -> None:
        raise NotImplementedError

    def _load(self, path: Path, put: Callable[[str, Any], object]) -> None:
        raise NotImplementedError


class Safetensors(_Saver):
    """`save_file`, and `safe_open` straight to the slot's device."""

    name = path = "safetensors"
    needs: tuple[str, ...] = ("torch", "safetensors")

    def _save(self, tensors: Mapping[str, Any], path: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path))

    def _load(self, path: Path, put: Callable[[str, Any], object]) -> None:
        from safetensors import safe_open

        with safe_open(str(path), framework="pt", device=self._device) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                put(name, file.get_tensor(name))


class TorchSave(_Saver):
    """`torch.save`, and `torch.load(mmap=True)`."""

    name = path = "torch"
    needs = ("torch",)

    def _save(self, tensors: Mapping[str, Any], path: Path) -> None:
        self._torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, str(path))

    def _load(self, path: Path, put: Callable[[str, Any], object]) -> None:
        for name, tensor in self._torch.load(str(path), mmap=True, weights_only=True).items():
            put(name, tensor)


class FastSafetensors(Safetensors):
    """`save_file` of safetensors, and the loader of fastsafetensors."""

    name = path = "fastsafetensors"
    needs = ("torch", "safetensors", "fastsafetensors")

    def _load(self, path: Path, put: Callable[[str, Any], object]) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), self._torch.device(self._device), nogds=True)
        try:
            loader.add_filenames({0: [str(path)]})
            buffers = loader.copy_files_to_device()
            try:
                for name in self._tensors:
                    put(name, buffers.get_tensor(name))
                self._memory.synchronize()
            finally:
                buffers.close()
        finally:
            loader.close()


SAVERS = {saver.name: saver for saver in (Safetensors, TorchSave, FastSafetensors)}


def _tensor(torch: Any, plane: PlaneRows) -> Any:
    """The array as a tensor of bytes, with no copy; its first axis is the tokens."""
    tensor = torch.from_dlpack(plane.array)
    return tensor.reshape(len(tensor), -1)
