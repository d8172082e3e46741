"""What ranks could compute at most, and how that is known: utilisation is measured against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from triptych.cluster.cluster import Cluster

_MEASURED = ("fp32", "fp64")  # on CPUs: numpy has no narrower products


class Peak(NamedTuple):
    """The peak of all ranks together; None if it is not known."""

    flops_per_s: float | None
    source: str

    @property
    def text(self) -> str:
        """One line about it."""
        if self.flops_per_s is None:
            return f"model FLOPs utilisation: unknown, {self.source}"
        return (
            f"model FLOPs utilisation is of {self.flops_per_s / 1e12:.4g} TFLOP/s in all: "
            f"{self.source}"
        )

    def to_json(self) -> dict[str, Any]:
        """The values by name."""
        return self._asdict()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Peak:
        """What `to_json` gave."""
        flops = values["flops_per_s"]
        return cls(None if flops is None else float(flops), str(values["source"]))


def peak_of(cluster: Cluster, ranks: int, dtype: str, given_tflops: float | None) -> Peak:
    """The peak of `ranks` devices of a cluster for dense products in a dtype.

    A user's figure comes first. A device that the catalogue lacks has no known peak, nor has a CPU
    in a dtype that was not measured.
    """
    if given_tflops is not None:
        source = f"[run] peak_tflops = {given_tflops:g} a rank"
        return Peak(given_tflops * 1e12 * ranks, source)
    devices = {group.device.name: group.device for group in cluster.groups}
    names = " and ".join(devices)
    if len(devices) > 1:
        return Peak(None, f"{names} are unlike devices: [run] peak_tflops states one peak")
    device = next(iter(devices.values()))
    is_guess = any("not in the catalogue" in n or "not measured:" in n for n in cluster.notes)
    is_unmeasured = device.kind == "cpu" and dtype not in _MEASURED
    flops = device.peak_flops.get(dtype)
    if is_guess or is_unmeasured or flops is None:
        return Peak(None, f"the {dtype} peak of {names} is not: [run] peak_tflops states it")
    return Peak(flops * ranks, f"{names}, {dtype}, {ranks} ranks; {device.source}")
