"""The one place where errors become HTTP responses, all in OpenAI's shape."""

from __future__ import annotations

import logging
import math
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from local_engine.http.answers import error_body
from prfaas.errors import BodyTooLarge, EngineUnavailable, NotFound, PrfaasError

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID_KEY = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_DEFAULT_RETRY_S = 1.0


def status_of(error: PrfaasError) -> int:
    """The HTTP status. An unavailable engine is a bad gateway to a gateway; this is the engine."""
    return 503 if isinstance(error, EngineUnavailable) else error.http_status


def error_response(error: PrfaasError) -> web.Response:
    """A whole response; 503 always says when to come back."""
    status = status_of(error)
    headers = {}
    if status == 503 or error.retry_after_s is not None:
        wait_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    response = web.Response(
        status=status, body=error_body(error), content_type="application/json", headers=headers
    )
    if isinstance(error, BodyTooLarge):
        response.force_close()  # the rest of the body is not worth reading
    return response


def request_id(request: web.Request) -> str:
    """The caller's request id where it sent a sane one, else a new one."""
    known = request.get(_REQUEST_ID_KEY)
    if known is None:
        sent = request.headers.get(REQUEST_ID_HEADER, "")
        known = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        request[_REQUEST_ID_KEY] = known
    return known


async def echo_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Signal handler: every response names its request."""
    if isinstance(request, web.Request):
        response.headers[REQUEST_ID_HEADER] = request_id(request)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Translate whatever a handler raises before its first byte."""
    try:
        return await handler(request)
    except PrfaasError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.client_max_size
        return error_response(BodyTooLarge(f"the body is over the limit of {limit} bytes"))
    except web.HTTPMethodNotAllowed as error:
        response = error_response(NotFound(f"{request.method} is not allowed on {request.path}"))
        response.set_status(error.status)
        response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.HTTPNotFound:
        return error_response(NotFound(f"no such path: {request.path}"))
    except (web.HTTPException, ConnectionError):
        raise  # the library's own protocol answers, or nobody is left to answer to
    except Exception:
        log.exception("request %s failed", request_id(request))
        return error_response(PrfaasError("internal error; the server's log has the details"))
