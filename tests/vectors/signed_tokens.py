"""Creates signed_tokens.json with Python's own hmac: `python3 tests/vectors/signed_tokens.py > tests/vectors/signed_tokens.json`.

This is a separate implementation of the signed tokens of src/spec.md. A test runs it, and compares
its output.
"""

import base64
import hashlib
import hmac
import json
import sys

KEYS = {
    "k1": bytes(range(32)),
    "2026-11.b": b"\xff" * 64,
    # This key is longer than a block of SHA-256.
    "k" * 64: bytes(i % 251 for i in range(100)),
}


def number(value):
    return value.to_bytes(8, "big")


def text(value):
    value = value.encode()
    return number(len(value)) + value


def message(key, audience, resource, token):
    return b"tower-fence token v1" + text(key) + text(audience) + text(resource) + number(token)


def mac(key, audience, resource, token):
    whole = hmac.new(KEYS[key], message(key, audience, resource, token), hashlib.sha256)
    return whole.digest()[:16]


def name(resource):
    if resource.isascii():
        return '"' + resource.replace("\\", "\\\\").replace('"', '\\"') + '"'
    octets = resource.encode()
    plain = lambda octet: 0x20 <= octet <= 0x7E and octet not in b'%"'
    return '%"' + "".join(chr(o) if plain(o) else "%%%02x" % o for o in octets) + '"'


def field(key, resource, token, code):
    encoded = base64.b64encode(code).decode()
    return f'{token};resource={name(resource)};key="{key}";mac=:{encoded}:'


def signed(key, audience, resource, token):
    code = mac(key, audience, resource, token)
    return {
        "key": key,
        "audience": audience,
        "resource": resource,
        "token": token,
        "message": message(key, audience, resource, token).hex(),
        "mac": code.hex(),
        "field": field(key, resource, token, code),
    }


def refused():
    code = mac("k1", "", "sku-1", 42)
    good = field("k1", "sku-1", 42, code)
    other = lambda **changed: mac(**{"key": "k1", "audience": "", "resource": "sku-1", "token": 42} | changed)
    with_mac = lambda code: field("k1", "sku-1", 42, code)
    flipped = bytes([code[0] ^ 1]) + code[1:]
    yield "not signed", '42;resource="sku-1"'
    yield "not signed, and bare", "42"
    yield "without the resource", good.replace(';resource="sku-1"', "")
    yield "without the key", good.replace(';key="k1"', "")
    yield "without the MAC", good.split(";mac")[0]
    yield "another token", good.replace("42;", "43;")
    yield "another resource", good.replace("sku-1", "sku-2")
    yield "another key", good.replace("k1", "2026-11.b")
    yield "an unknown key", good.replace("k1", "k2")
    yield "one bit of the MAC", with_mac(flipped)
    yield "an empty MAC", with_mac(b"")
    yield "the first byte of the MAC", with_mac(code[:1])
    yield "15 bytes of the MAC", with_mac(code[:15])
    yield "all 32 bytes of the MAC", with_mac(hmac.new(KEYS["k1"], message("k1", "", "sku-1", 42), hashlib.sha256).digest())
    yield "the MAC twice", with_mac(code * 2)
    yield "the MAC of another token", with_mac(other(token=41))
    yield "the MAC of another resource", with_mac(other(resource="sku-2"))
    yield "the MAC of another key", with_mac(other(key="2026-11.b"))
    yield "the MAC of another audience", with_mac(other(audience="shop"))
    bare = hmac.new(KEYS["k1"], b'42;resource="sku-1"', hashlib.sha256)
    yield "the MAC of another text", with_mac(bare.digest()[:16])
    later = message("k1", "", "sku-1", 42).replace(b"v1", b"v2")
    yield "the MAC of another version", with_mac(hmac.new(KEYS["k1"], later, hashlib.sha256).digest()[:16])


json.dump(
    {
        "description": "Signed tokens. Each field in `signed` is written by an issuer with this key and this audience: `message` is "
        "the signed message, and `mac` is the first 16 bytes of its HMAC-SHA-256, both in hexadecimal digits. A layer with these "
        "keys and no audience refuses each field in `refused`. Created by signed_tokens.py.",
        "keys": {key: secret.hex() for key, secret in KEYS.items()},
        "signed": [
            signed("k1", "", "sku-1", 42),
            signed("k1", "", "sku-1", 1),
            signed("k1", "", "sku-1", 999999999999999),
            signed("k1", "shop", "sku-1", 42),
            signed("2026-11.b", "", "café", 1000000001),
            signed("k1", "", 'a "b" \\c', 7),
            signed("k" * 64, "ümlaut", "x" * 255, 123456789012345),
        ],
        "refused": [{"comment": comment, "field": value} for comment, value in refused()],
    },
    sys.stdout,
    indent=2,
    ensure_ascii=False,
)
print()
