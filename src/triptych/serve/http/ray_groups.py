"""Groups on the nodes of a Ray cluster: Ray places and starts them, we talk to them over TCP.

Needs the optional package `ray`. Every node must see the models' folders under the same paths. Ray
counts a CPU for each core of a group (one if it names none), and a GPU for each rank where there
are any; the group's process is Ray's worker.
"""

from __future__ import annotations

import secrets
from multiprocessing.connection import Client, Connection, Listener

import ray

from triptych.errors import RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.serve.core.limits import Limits
from triptych.serve.http.group_process import main
from triptych.serve.http.link import limits_from
from triptych.serve.http.messages import Start

_GOODBYE_S = 10.0


def connect(address: str) -> None:
    """Joins a cluster; `local` starts one on this machine. Raises RunError if there is none."""
    try:
        ray.init(None if address == "local" else address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(f"no Ray cluster at {address}: {error}") from error


def _live(address: tuple[str, int], key: bytes) -> None:
    """The life of a group, in a worker of Ray."""
    pipe = Client(address, authkey=key)
    assert isinstance(pipe, Connection)
    main(pipe)


class RayGroup:
    """A group that Ray runs, with the face of a `GroupProcess`."""

    pipe: Connection

    def __init__(self, spec: HostGroup) -> None:
        key = secrets.token_bytes(32)
        host = ray.util.get_node_ip_address()
        self._listener = Listener((host, 0), authkey=key)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        task = ray.remote(_live).options(
            num_cpus=max(1, len(spec.cores)),
            num_gpus=spec.shape.devices if has_gpus else 0,
            max_retries=0,
        )
        self._task = task.remote(self._listener.address, key)

    def open(self, start: Start) -> None:
        """Keeps what it shall load until Ray has started it."""
        self._start = start

    def opened(self, num_models: int) -> dict[str, Limits]:
        """Waits until all are ready. Raises TriptychError with what kept them from that."""
        pipe = self._listener.accept()
        assert isinstance(pipe, Connection)
        self.pipe = pipe
        self.pipe.send(self._start)
        return limits_from(self.pipe, num_models, self.death)

    def death(self) -> TriptychError:
        """What is to be said if it ended without a word."""
        try:
            ray.get(self._task, timeout=_GOODBYE_S)
        except Exception as error:  # whatever Ray has to say of it
            return RunError(f"the group's worker ended: {error}")
        return RunError("the group's worker ended")

    def end(self, *, is_waited_for: bool = True) -> None:
        """Ends it: it may take its time to, or not."""
        if is_waited_for:
            ray.wait([self._task], timeout=_GOODBYE_S)
        ray.cancel(self._task, force=True)
        self._listener.close()
        if hasattr(self, "pipe"):
            self.pipe.close()

    def __enter__(self) -> RayGroup:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(is_waited_for=kind is None)
