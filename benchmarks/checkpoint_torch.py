"""PyTorch's distributed checkpointing as one side, in an environment that has torch."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

# By name: the environment that checks types has no torch.
torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def make(case: dict[str, Any]) -> Torch:
    if case["processes"] > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]))
        dist.init_process_group("gloo", rank=case["process"], world_size=case["processes"])
    return Torch(case)


class Torch:
    def __init__(self, case: dict[str, Any]) -> None:
        kind = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
        torch.manual_seed(case["seed"])
        rows, columns = case["shape"]
        rows //= case["processes"]
        # A process has tensors of its own names: what it would have of a split one.
        self.state = {
            f"layer{number:04d}.{case['process']}": torch.randn(rows, columns).to(kind)
            for number in range(case["leaves"])
        }
        self._is_alone = case["processes"] == 1
        self.restored: dict[str, Any] | None = None

    def save(self, folder: str) -> tuple[float, float]:
        started_s = time.perf_counter()
        writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=os.cpu_count() or 1)
        dcp.save(self.state, storage_writer=writer, no_dist=self._is_alone)
        took_s = time.perf_counter() - started_s
        return took_s, took_s

    def restore(self, folder: str, layout: str) -> None:
        del layout  # A tensor is whole in its process.
        self.restored = {name: torch.empty_like(x) for name, x in self.state.items()}
        dcp.load(self.restored, storage_reader=dcp.FileSystemReader(folder), no_dist=self._is_alone)

    def drop(self) -> None:
        self.restored = None

    def verify(self) -> bool:
        restored, self.restored = self.restored, None
        assert restored is not None
        return all(bool(torch.equal(x, restored[name])) for name, x in self.state.items())
