"""Where a model runs: devices, links and groups of identical nodes. SI units throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.cluster.measured import Measured, Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    `peak_flops` is the dense sheet peak by dtype; what is attained of it: `gemm_burst` by short
    matrix products, `gemm_efficiency` by those that last (power), `flash_efficiency` by attention
    kernels of the first, second and third generation on long sequences; `memory_efficiency` of the
    memory's by memory-bound operators. `read_bytes_per_s` is of what is only read, once and in
    order, where that was measured (weights of a product of few rows). What was `measured` on it
    counts instead where it is there.
    """

    name: str
    kind: str  # "cuda", "rocm", "tpu", "cpu", ...
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]  # dtype -> FLOP/s
    gemm_efficiency: float = 0.75
    gemm_burst: float = 0.0  # 0: as `gemm_efficiency`
    gemm_ramp_k: float = 200.0  # inner dimension at which half of the rate is reached
    multiprocessors: int = 0  # 0: none to fill with tiles, as on a CPU
    flash_efficiency: tuple[float, float, float] = (0.36, 0.5, 0.58)
    memory_efficiency: float = 0.85
    read_bytes_per_s: float = 0.0  # 0: as memory-bound operators
    operator_s: float = 5e-6  # host or launch time of one operator
    source: str = ""
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between devices: seconds a message, bytes a second in one direction of one device.

    `bytes_per_s` is the sheet's; of it `efficiency` is attained by large collectives, which take
    `start_s` to start and up to `ramp_s` to come to their full rate.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    efficiency: float = 0.8
    start_s: float = 0.0
    ramp_s: float = 0.0
    source: str = ""
    measured: Messages = field(default_factory=dict)  # counts instead where it is there


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes; `link` connects the devices of one node."""

    nodes: int
    devices_per_node: int
    device: Device
    link: Link

    @property
    def num_devices(self) -> int:
        """Devices in the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes joined by `network` (bytes per second are of one device's share)."""

    name: str
    groups: tuple[NodeGroup, ...]
    network: Link
    notes: tuple[str, ...] = field(default=())

    @property
    def num_devices(self) -> int:
        """Devices in all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def device(self) -> Device:
        """The device of a uniform cluster (the first group's)."""
        return self.groups[0].device

    @property
    def devices_per_node(self) -> int:
        """Devices of a node of the first group."""
        return self.groups[0].devices_per_node

    def link(self, ranks: tuple[int, ...] | range) -> Link:
        """The slowest link that a group of ranks (node-major order) has to cross."""
        places = {self._place(rank) for rank in ranks}
        if len(places) > 1:
            return self.network
        return self.groups[next(iter(places))[0] if places else 0].link

    def _place(self, rank: int) -> tuple[int, int]:
        """Group and node, both by index, of a rank."""
        for index, group in enumerate(self.groups):
            if rank < group.num_devices:
                return index, rank // group.devices_per_node
            rank -= group.num_devices
        raise IndexError(f"the cluster has {self.num_devices} devices")
