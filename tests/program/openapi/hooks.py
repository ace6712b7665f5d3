"""What a JSON Schema cannot say of a request that is right."""

import uuid

import schemathesis

# A name has at most 255 bytes; a schema counts characters.
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
    """A request that is to be right has a key of its own: one that was used for another is refused, 422."""
    if case.meta and case.meta.generation.mode.is_positive and "Idempotency-Key" in (case.headers or {}):
        case.headers["Idempotency-Key"] = f'"{uuid.uuid4()}"'
