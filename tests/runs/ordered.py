"""On three CPU ranks: every message on channels without tags, as between GPUs, with gloo in the place of NCCL.

torchrun --nproc-per-node 3 tests/runs/ordered.py FOLDER

Writes FOLDER/RANK.json: case -> how far the training lies from the plain model's, and the number of messages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.runtime.messages import nccl

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

import ranks  # beside this file

if TYPE_CHECKING:
    from assigner.runtime.messages.ordering import Message

messages = 0


class Counted(nccl.DirectChannels):
    """Channels that count."""

    def start(self, message: Message, tensor: torch.Tensor) -> dist.Work | None:
        global messages  # noqa: PLW0603 - one number of one process
        messages += 1
        return super().start(message, tensor)


def main() -> None:
    nccl.GROUP_BACKEND = "gloo"
    nccl.direct_ranks = lambda *_: frozenset(range(dist.get_world_size()))
    nccl.DirectChannels = Counted
    ranks.DRAWN = 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: ranks.written(name) for name in ranks.PLANS}
    found["random plans"] = ranks.drawn()
    found["accumulation"] = ranks.accumulation()
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps({"worst": found, "messages": messages}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
