"""What `--objective` and `--price` say."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.cluster.catalogue import entries
from triptych.cluster.cluster import Cluster
from triptych.cluster.names import find_device
from triptych.errors import ClusterError, InputError, Problem
from triptych.search.objective import Objective

ANY = ""
"""The device of a price that is given without one."""

_WORKS = "--price 2.50, or --price H100-SXM=2.50,A100-SXM4-80GB=1.20"


def read_prices(text: str | None) -> dict[str, float]:
    """Prices by the name of the device. Raises InputError with every word that is no price."""
    prices: dict[str, float] = {}
    problems: list[Problem] = []
    for word in filter(None, (text or "").split(",")):
        name, _, value = word.rpartition("=")
        try:
            device = find_device(name, entries()).device.name if name else ANY
            prices[device] = float(value)
        except ClusterError as error:
            problems.extend(error.problems)
        except ValueError:
            problems.append(Problem(f"--price {word}", "a price is a number", _WORKS))
        else:
            if not prices[device] > 0:
                problems.append(Problem(f"--price {word}", "a price is above 0", _WORKS))
    if problems:
        raise InputError(problems)
    return prices


def price_of(prices: Mapping[str, float], cluster: Cluster) -> float | None:
    """The price of a device of a cluster for an hour: the mean over its devices; None if unknown.

    Raises InputError if prices are given by device, but not that of one of the cluster's.
    """
    if not prices:
        return None
    total = 0.0
    for group in cluster.groups:
        name = group.device.name
        price = prices.get(name, prices.get(ANY))
        if price is None:
            rule = "a cluster has a price if all its devices have one"
            raise InputError(Problem(f"--price says nothing of {name}", rule, f"{name}=2.50"))
        total += price * group.num_devices
    return total / cluster.num_devices


def check_objective(name: str, prices: Mapping[str, float], text: str | None) -> None:
    """Returns if the objective exists and has what it needs. Raises InputError otherwise."""
    Objective(name=name)
    if name == "money" and not prices and not text:
        rule = "money needs the price of a device for an hour"
        raise InputError(Problem("--objective money without --price", rule, _WORKS))
