"""Rules for valid requests that JSON Schema cannot express."""

import uuid

import schemathesis

# A name has at most 255 bytes, but a schema counts characters.
MAX_BYTES = 255


def _fits(value):
    return not isinstance(value, str) or len(value) > MAX_BYTES or len(value.encode("utf-8", "replace")) <= MAX_BYTES


@schemathesis.hook
def filter_path_parameters(context, path_parameters):
    return path_parameters is None or all(_fits(value) for value in path_parameters.values())


@schemathesis.hook
def filter_body(context, body):
    return not isinstance(body, dict) or _fits(body.get("owner"))


@schemathesis.hook
def before_call(context, case, kwargs):
    if not (case.meta and case.meta.generation.mode.is_positive):
        return
    # A key of another request would be refused with 422.
    if "Idempotency-Key" in (case.headers or {}):
        case.headers["Idempotency-Key"] = f'"{uuid.uuid4()}"'
    # On a busy machine, a shorter lease may expire before it is announced, which is answered with 503.
    if isinstance(case.body, dict) and isinstance(case.body.get("ttl_ms"), int):
        case.body["ttl_ms"] = max(case.body["ttl_ms"], 5_000)
