"""What an agent says of its engine when it pairs: fingerprint and handshake out of Hello."""

from __future__ import annotations

import logging

from prfaas.codecs import CodecSet
from prfaas.frames import WIRE_MAJOR, WIRE_MINOR
from prfaas.layout import Fingerprint, KvLayout
from prfaas.session_messages import Feature, Handshake
from prfaas_connect.port.messages import Hello

log = logging.getLogger(__name__)


def codecs_for(codecs: CodecSet, hello: Hello) -> CodecSet:
    """Those that KV of this engine may be sent with."""
    return codecs.for_model(hello.model_identity)


def tell_left_out(codecs: CodecSet, hello: Hello) -> None:
    """Say which codecs an engine's model cannot use."""
    names = codecs_for(codecs, hello).names
    left_out = [name for name in codecs.names if name not in names]
    if left_out:
        log.warning("calibrated for another model than %r: %s", hello.model, ", ".join(left_out))


def fingerprint_of(hello: Hello, layout: KvLayout) -> Fingerprint:
    """Identity of the engine's KV."""
    return Fingerprint(
        wire_major=WIRE_MAJOR,
        model_identity=hello.model_identity,
        config_digest=hello.config_digest,
        tokenizer_digest=hello.tokenizer_digest,
        adapters=(),
        layout=layout,
    )


def handshake_of(
    name: str, hello: Hello, layout: KvLayout, codecs: CodecSet, instance: str = ""
) -> Handshake:
    """This side of a handshake; a client has no `instance`."""
    return Handshake(
        name=name,
        model=hello.model,
        wire_major=WIRE_MAJOR,
        wire_minor=WIRE_MINOR,
        features=Feature.ON_DEMAND | Feature.RECURRENT,
        fingerprint=fingerprint_of(hello, layout),
        codecs=codecs.names,
        chunk_tokens=hello.chunk_tokens,
        max_tokens=hello.max_tokens,
        instance=instance,
        engine_epoch=hello.epoch,
        paced=hello.paced,
    )
