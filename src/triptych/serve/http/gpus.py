"""Which GPUs of this machine the groups of a server run on."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cluster.machine import list_gpus
from triptych.errors import InputError, Problem


class Gpus:
    """The GPUs of this machine, dealt out so that groups share none while there are enough.

    A server that exchanges groups starts the new ones beside the old: these go where fewest run.
    Without GPUs nothing is dealt, and groups run on cores.

    Args:
        names: as `CUDA_VISIBLE_DEVICES` takes them.

    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._users = dict.fromkeys(names, 0)

    @classmethod
    def of_machine(cls) -> Gpus:
        """Those that this process may use."""
        return cls([gpu.uuid for gpu in list_gpus()])

    def __len__(self) -> int:
        return len(self._users)

    def require(self, ranks: int) -> None:
        """Raises InputError if there are GPUs, but fewer than ranks."""
        if 0 < len(self) < ranks:
            rule = f"each rank has a GPU of its own, and {len(self)} are visible"
            works = "fewer or smaller groups; CUDA_VISIBLE_DEVICES= (empty) serves on the CPU"
            raise InputError(Problem(f"groups of {ranks} ranks", rule, works))

    def take(self, ranks: int) -> tuple[str, ...]:
        """GPUs for a group, those with fewest groups first; at most as many as there are."""
        chosen = sorted(self._users, key=self._users.__getitem__)[:ranks]
        for name in chosen:
            self._users[name] += 1
        return tuple(chosen)

    def give_back(self, names: Sequence[str]) -> None:
        """A group on these has ended."""
        for name in names:
            self._users[name] -= 1
