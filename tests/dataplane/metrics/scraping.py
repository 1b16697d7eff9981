"""Scrapes of endpoints, as Prometheus' own parsers read them."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import NamedTuple

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

ACCEPTS_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SCRAPE_S = 20.0


class Page(NamedTuple):
    """What an endpoint answered."""

    status: int
    kind: str
    body: str


def ask(target: str, path: str = "/metrics", *, method: str = "GET", accept: str = "") -> Page:
    """A page of an endpoint, whatever its status is."""
    asked = urllib.request.Request(f"http://{target}{path}", method=method)
    if accept:
        asked.add_header("Accept", accept)
    try:
        answer = urllib.request.urlopen(asked, timeout=SCRAPE_S)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        kind = answer.headers.get("Content-Type", "")
        return Page(answer.status or 0, kind, answer.read().decode())


class Scrape:
    """The samples of one scrape."""

    def __init__(self, target: str, *, accept: str = "") -> None:
        page = ask(target, accept=accept)
        assert page.status == 200, page
        self.text = page.body
        parse = openmetrics if accept else text
        self.families = {family.name: family for family in parse(page.body)}
        self.samples = [sample for f in self.families.values() for sample in f.samples]

    def value(self, name: str, /, **labels: str) -> float:
        """The one sample with these labels, and maybe others."""
        found = self.all(name, **labels)
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def all(self, name: str, /, **labels: str) -> list[float]:
        """The values of all samples with these labels."""
        return [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def labels(self, name: str, label: str) -> set[str]:
        """The values of a label."""
        return {sample.labels[label] for sample in self.samples if sample.name == name}

    def names(self) -> dict[str, set[str]]:
        """Names of the plane's own series, with their labels."""
        found: dict[str, set[str]] = {}
        for sample in self.samples:
            if sample.name.startswith("dataplane_"):
                found.setdefault(sample.name, set()).update(sample.labels)
        return found
