"""Nodes of several devices, what connects them, and the traffic of collectives over them."""

from dataclasses import dataclass

from recipes.forecast import Device

REACHED = 0.8  # of a network card's data sheet, that NCCL's large collectives reach; assumed, not measured here


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives: from devices of its node, and through its network card."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.inside * times, self.between * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Cluster:
    """``devices`` of one kind in nodes of ``node`` devices each."""

    device: Device
    devices: int
    node: int = 8
    network: float = 50e9  # bytes per second of each device's network card, by its data sheet: 400 Gbit/s

    def members(self, ranks: int, stride: int) -> int:
        """Ranks of a group that share a node: a group has ``ranks`` ranks, ``stride`` apart from each other.

        >>> from recipes.forecast import DEVICES
        >>> cluster = Cluster(DEVICES["h200"], 64)
        >>> cluster.members(16, stride=1), cluster.members(16, stride=4), cluster.members(2, stride=8)
        (8, 2, 1)
        """
        return min(ranks, max(self.node // stride, 1))

    def gather(self, size: float, ranks: int, stride: int = 1) -> Traffic:
        """What a device receives when ``ranks`` ranks gather ``size`` bytes of which each has an equal part.

        Scattering sums of that size is the same backwards. Between nodes each part passes once into each node, and the ranks of a
        node share that work, each with its own card.

        >>> from recipes.forecast import DEVICES
        >>> cluster = Cluster(DEVICES["h200"], 16)
        >>> cluster.gather(800, ranks=8), cluster.gather(1600, ranks=16), cluster.gather(200, ranks=2, stride=8)
        (Traffic(inside=700.0, between=0.0), Traffic(inside=1500.0, between=100.0), Traffic(inside=0.0, between=100.0))
        """
        if ranks == 1:
            return Traffic()
        here = self.members(ranks, stride)
        nodes = -(-ranks // here)
        inside = size * (ranks - 1) / ranks if here > 1 else 0.0
        return Traffic(inside, size * (nodes - 1) / nodes / here)

    def exchange(self, size: float, ranks: int, stride: int = 1) -> Traffic:
        """What a device receives when each of ``ranks`` ranks spreads ``size`` bytes evenly over all of them.

        >>> from recipes.forecast import DEVICES
        >>> Cluster(DEVICES["h200"], 16).exchange(1600, ranks=16)
        Traffic(inside=700.0, between=800.0)
        """
        here = self.members(ranks, stride)
        return Traffic(size * (here - 1) / ranks, size * (ranks - here) / ranks)

    def send(self, size: float, ranks: int, stride: int) -> Traffic:
        """What a device receives on average when each of ``ranks`` ranks but the last sends ``size`` bytes to the next one.

        >>> from recipes.forecast import DEVICES
        >>> cluster = Cluster(DEVICES["h200"], 16)
        >>> cluster.send(1600, ranks=2, stride=8), cluster.send(1600, ranks=4, stride=4)
        (Traffic(inside=0.0, between=800.0), Traffic(inside=800.0, between=400.0))
        """
        crossing = -(-ranks // self.members(ranks, stride)) - 1
        return Traffic(size * (ranks - 1 - crossing) / ranks, size * crossing / ranks)

    def seconds(self, traffic: Traffic) -> float:
        """Seconds of traffic that computation does not hide."""
        return self.inside_seconds(traffic) + self.between_seconds(traffic)

    def inside_seconds(self, traffic: Traffic) -> float:
        """Seconds that traffic within nodes adds to a step, at the rate measured on H200; see `Device.link`."""
        return traffic.inside / self.device.link

    def between_seconds(self, traffic: Traffic) -> float:
        """Seconds of traffic between nodes."""
        return traffic.between / (REACHED * self.network)
