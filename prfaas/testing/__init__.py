"""Test support that ships: clocks, links one can bend, tiny models, contract suites."""
