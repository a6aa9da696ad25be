"""One stack for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.testing.client_stack import ClientStack, client_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientStack]:
    with client_stack(tmp_path_factory.mktemp("clients")) as made:
        yield made
