"""docs/protocol.md has the agents' own numbers and reasons right."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np

from prfaas import receive_session, send_session
from remote_prefill import admission, decode_agent, fetch, served_link, service, watch
from remote_prefill.numeric_probe import PROBE_TOKENS, probe_tokens

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_message_sizes_and_queues() -> None:
    assert (send_session.FIRST_MESSAGES, send_session.FIRST_MESSAGE_BYTES) == (4, 256 << 10)
    assert send_session.MESSAGE_BYTES == 1 << 20
    assert "first four messages, later messages | 256 KiB, 1 MiB" in PAGE
    assert f"| broken frames in a row | {receive_session.CORRUPT_IN_A_ROW} |" in PAGE
    assert f"| {served_link.MAX_LINKS}, {served_link.MAX_LANES} |" in PAGE
    assert f"| burst of `Ping` | {service.MAX_PROBE_BYTES >> 20} MiB |" in PAGE
    assert f"holds {watch.MAX_HASHES:,} hashes" in PAGE


def test_the_probes_tokens_are_those_of_the_page() -> None:
    assert f"The same {PROBE_TOKENS} fixed tokens" in PAGE
    assert "`i * 2654435761 mod vocab_size`" in PAGE
    expected = [i * 2654435761 % 49152 for i in range(1, PROBE_TOKENS + 1)]
    assert probe_tokens(49152, 8192).tolist() == expected
    assert probe_tokens(49152, 8192).dtype == np.int32


def test_every_reason_for_dialling_nobody_is_named() -> None:
    sources = [inspect.getsource(module) for module in (admission, decode_agent, fetch)]
    reasons = set(re.findall(r'Admission\(\s*"([a-z_]+)"', "".join(sources[:2])))
    reasons |= set(re.findall(r'"(staging_[a-z_]+)"', sources[2]))
    assert len(reasons) >= 10
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()
