"""What it exposes is what prometheus_client's own counter would."""

from prometheus_client import CollectorRegistry, Counter, generate_latest

from gateway.counts import Counts


def test_it_counts_by_labels_as_the_usual_counter_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("c", "text", "target", "status")
    ours.register(counts)
    other = Counter("c", "text", ["target", "status"], registry=theirs)
    for values in (("a", "200"), ("a", "200"), ("b", "500")):
        counts.inc(*values)
        other.labels(*values).inc()
    assert lines(ours) == lines(theirs)
    assert ours.get_sample_value("c_total", {"target": "a", "status": "200"}) == 2


def test_nothing_counted_is_nothing_exposed() -> None:
    registry = CollectorRegistry()
    registry.register(Counts("c", "text", "target"))
    assert [line for line in lines(registry) if not line.startswith("#")] == []


def test_a_count_without_labels_is_there_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts, other = Counts("c", "text"), Counter("c", "text", registry=theirs)
    ours.register(counts)
    assert lines(ours) == lines(theirs)
    for count in (7, 0, 1 << 40):
        counts.add(count)
        other.inc(count)
        assert lines(ours) == lines(theirs)


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]
