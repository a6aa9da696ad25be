"""`kv_transfer_params`: the signed plan a gateway hands to an engine and its agent carries out.

It holds names, never addresses. The gateway and the agent share a key; the engine and its plug-in
pass the dict through. A transfer id is single-use until it expires, which stops replays (the agent
keeps the ids).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _text
from typing import Any

import msgspec

from prfaas.errors import InvalidRequest, Unauthorized

PARAMS_VERSION = 1


class PlanStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance to try, by the names of the agent's own configuration."""

    peer: str
    instance: str


class TransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway decided, as it travels. Times are Unix seconds; `deadline_s` counts from
    receipt.
    """

    version: int
    transfer_id: str
    plan: tuple[PlanStep, ...]
    on_failure: str
    """`local` (granted by the fallback budget) or `reject`."""
    quality: str
    deadline_s: float
    salt: str
    expires: float
    tenant: str = ""
    """For whom, as the gateway knows its clients; empty: nobody in particular."""
    traceparent: str | msgspec.UnsetType = msgspec.UNSET
    """Span of the gateway that the agents' are children of; left out: nobody traces."""
    mac: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON types, for the request body."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class Signer:
    """Signs with one key, which is hashed once; nothing to close."""

    def __init__(self, key: bytes) -> None:
        self._begun = hmac.new(key, digestmod="sha256")

    def mac(self, text: str) -> str:
        """Hexadecimal; of ASCII alone."""
        begun = self._begun.copy()
        begun.update(text.encode("ascii"))
        return begun.hexdigest()

    def signed(self, params: TransferParams) -> msgspec.Raw:
        """The parameters with their mac, as they go into a body: in JSON already, for what is
        signed is JSON.
        """
        text = canonical(params)
        return msgspec.Raw(f'{text[:-1]},"mac":"{self.mac(text)}"}}')


def sign(params: TransferParams, key: bytes) -> TransferParams:
    """The same parameters with their HMAC-SHA256 over all other fields."""
    return msgspec.structs.replace(params, mac=_mac(params, key))


def parse(data: Mapping[str, Any]) -> TransferParams:
    """Parse without verifying. Raises InvalidRequest naming the field (an address field is
    unknown).
    """
    try:
        params = msgspec.convert(data, TransferParams)
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as exc:
        raise InvalidRequest(f"kv_transfer_params: {exc}", param="kv_transfer_params") from exc
    if params.version != PARAMS_VERSION:
        raise InvalidRequest(
            f"kv_transfer_params: version {params.version} is not {PARAMS_VERSION}",
            param="kv_transfer_params.version",
        )
    if params.on_failure not in ("local", "reject"):
        raise InvalidRequest(
            f"kv_transfer_params: on_failure {params.on_failure!r} is neither local nor reject",
            param="kv_transfer_params.on_failure",
        )
    return params


def verify(params: TransferParams, keys: Sequence[bytes], now: float) -> None:
    """Raise Unauthorized when no key made the mac, or it is past `expires` (Unix seconds)."""
    mac = params.mac.encode(errors="surrogatepass")  # as text, only ASCII could be compared
    if not any(hmac.compare_digest(_mac(params, key).encode(), mac) for key in keys):
        raise Unauthorized("kv_transfer_params: signature does not verify")
    if now > params.expires:
        raise Unauthorized("kv_transfer_params: expired")


def key_id(key: bytes) -> str:
    """Tells keys apart without telling them: both sides compare it before anything is signed."""
    return hmac.digest(key, b"prfaas transfer key id", "sha256").hex()[:16]


def _mac(params: TransferParams, key: bytes) -> str:
    return hmac.digest(key, canonical(params).encode(), "sha256").hex()


def canonical(params: TransferParams) -> str:
    """What is signed: all fields but the mac as JSON with sorted keys, no blanks, ASCII only.

    Written out, as every offloaded request needs it: `json.dumps` takes five times as long.
    """
    plan = ",".join(
        [f'{{"instance":{_text(s.instance)},"peer":{_text(s.peer)}}}' for s in params.plan]
    )
    trace = ""
    if params.traceparent is not msgspec.UNSET:
        trace = f'"traceparent":{_text(params.traceparent)},'
    return (
        f'{{"deadline_s":{params.deadline_s!r},"expires":{params.expires!r},'
        f'"on_failure":{_text(params.on_failure)},"plan":[{plan}],'
        f'"quality":{_text(params.quality)},"salt":{_text(params.salt)},'
        f'"tenant":{_text(params.tenant)},{trace}"transfer_id":{_text(params.transfer_id)},'
        f'"version":{params.version!r}}}'
    )


@dataclass(slots=True)
class SeenTransfers:
    """Transfer ids in use or used, until they expire; bounded. Owned by the agent."""

    capacity: int
    _expiry: dict[str, float]

    def __init__(self, capacity: int = 65536) -> None:
        self.capacity = capacity
        self._expiry = {}

    def claim(self, transfer_id: str, expires: float, now: float) -> bool:
        """True the first time; False for a replay, or when the table is full of unexpired ids."""
        if transfer_id in self._expiry and self._expiry[transfer_id] >= now:
            return False
        if len(self._expiry) >= self.capacity:
            self._expiry = {k: v for k, v in self._expiry.items() if v >= now}
            if len(self._expiry) >= self.capacity:
                return False
        self._expiry[transfer_id] = expires
        return True
