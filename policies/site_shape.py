"""The shape of a site: how many of D's nodes prefill, and how many instances its peer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.scenario import Scenario
from prfaas.errors import ConfigError

PREFILL, PEER = "prefill_instances", "peer_instances"
"""Names of what a study searches."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a study may change of a site; None: as the scenario has it."""

    prefill_instances: int | None = None
    peer_instances: int | None = None

    def applied(self, scenario: Scenario) -> Scenario:
        """The scenario with this shape."""
        if self.prefill_instances is not None:
            local = scenario.local.model_copy(update={PREFILL: self.prefill_instances})
            scenario = scenario.model_copy(update={"local": local})
        if self.peer_instances is not None:
            (peer,) = scenario.peers
            changed = peer.model_copy(update={"instances": self.peer_instances})
            scenario = scenario.model_copy(update={"peers": (changed,)})
        return scenario


def with_prefill(scenario: Scenario, count: int) -> Scenario:
    """The scenario with so many of D's nodes prefilling. Raises ConfigError where that leaves none
    for one of both."""
    local = scenario.local
    if local.colocated:
        raise ConfigError(f"scenario {scenario.name} has nodes that do both: they are not split")
    if not 0 < count < local.instances:
        raise ConfigError(
            f"{count} of {local.instances} nodes cannot prefill: at least one has to, and one has "
            "to decode"
        )
    return Shape(prefill_instances=count).applied(scenario)


AS_IT_IS = Shape()
"""The scenario's own shape."""


def spans(scenario: Scenario) -> Mapping[str, tuple[int, int]]:
    """What of a scenario's shape can be searched, each with its least and its most: D keeps a node
    for either work, one peer runs as many instances as the scenario has or fewer.

    Raises ConfigError where there is nothing.
    """
    found: dict[str, tuple[int, int]] = {}
    if not scenario.local.colocated and scenario.local.instances > 1:
        found[PREFILL] = (1, scenario.local.instances - 1)
    if len(scenario.peers) == 1 and scenario.peers[0].instances > 1:
        found[PEER] = (1, scenario.peers[0].instances)
    if not found:
        raise ConfigError("the scenario's shape leaves nothing to search: one node, one instance")
    return found


def usual(scenario: Scenario) -> Mapping[str, int]:
    """The scenario's own shape, by the same names."""
    have = {
        PREFILL: scenario.local.prefill_instances,
        PEER: scenario.peers[0].instances if scenario.peers else None,
    }
    found = {name: have[name] for name in spans(scenario)}
    return {name: value for name, value in found.items() if value is not None}
