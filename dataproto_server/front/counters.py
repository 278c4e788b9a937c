"""Numbers of the server, as Prometheus reads them."""

from collections import defaultdict
from collections.abc import Mapping

PREFIX = "dataproto_serve_"


class Counters:
    """Sums since the start of this process, by name and labels.

    >>> counters = Counters()
    >>> counters.add("requests", route="asample", status=200)
    >>> print(counters.text({"open_sessions": 2}), end="")
    # TYPE dataproto_serve_requests_total counter
    dataproto_serve_requests_total{route="asample",status="200"} 1
    # TYPE dataproto_serve_open_sessions gauge
    dataproto_serve_open_sessions 2
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(lambda: defaultdict(float))

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        self.sums[name][tuple((label, str(value)) for label, value in sorted(labels.items()))] += amount

    def text(self, gauges: Mapping[str, float]) -> str:
        """All counters, and gauges, in Prometheus's text format."""
        lines = []
        for name, values in sorted(self.sums.items()):
            lines.append(f"# TYPE {PREFIX}{name}_total counter")
            for labels, value in sorted(values.items()):
                spelled = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
                lines.append(f"{PREFIX}{name}_total{{{spelled}}} {value:g}".replace("{}", ""))
        for name, value in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
