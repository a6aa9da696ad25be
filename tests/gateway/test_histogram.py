"""The histogram says what prometheus_client's own would say of the same values."""

import random

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.histogram import Histogram

BUCKETS = (0.002, 0.01, 0.5, 5)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): round(sample.value, 9)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_it_counts_as_the_original_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("x_seconds", "Text.", "target", BUCKETS)
    ours.register(mine)
    other = prometheus_client.Histogram(
        "x_seconds", "Text.", ["target"], buckets=BUCKETS, registry=theirs
    )
    rng = random.Random(1)
    for _ in range(300):
        value = rng.choice((*BUCKETS, 0.0, rng.random(), rng.random() * 10))
        of, count = rng.choice(("local", "remote")), rng.randrange(1, 5)
        mine.observe(of, value, count)
        for _ in range(count):
            other.labels(of).observe(value)
    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) == 2 * (len(BUCKETS) + 3)


def test_without_values_it_is_known_and_empty() -> None:
    registry = CollectorRegistry()
    registry.register(Histogram("x_seconds", "Text.", "target", BUCKETS))
    assert b"# TYPE x_seconds histogram" in prometheus_client.generate_latest(registry)
    assert samples(registry) == {}
