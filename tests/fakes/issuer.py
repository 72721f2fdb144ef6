"""An identity provider: it signs tokens and serves its public keys (RFC 7517) on a loopback port, faults included."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.fakes import Exchange, LoopbackServer, Recorded, serving

KEY_SET_PATH = "/keys.json"
AUDIENCE = "palisade"
# Members of an RSA private key; the others of a JWK are public.
SECRET_MEMBERS = {"d", "p", "q", "dp", "dq", "qi"}

FAULTS = (
    "server_error",
    "not_found",
    "redirect",
    "html",
    "no_json",
    "deep_json",
    "no_keys_member",
    "keys_no_list",
    "endless",
    "drip",
    "hang",
    "reset",
    "cut",
    "zipped",
    "invalid_utf8",
)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key for one algorithm, with its public half as a JWK."""

    algorithm: str
    private: Any
    public: dict[str, Any]


@cache
def signing_key(algorithm: str, number: int = 0) -> SigningKey:
    """The same key for the same number, for a whole run: an RSA key takes a tenth of a second to make."""
    match algorithm[:2]:
        case "Ed":
            private: Any = ed25519.Ed25519PrivateKey.generate()
            jwk = OKPAlgorithm.to_jwk(private, as_dict=True)
        case "ES":
            curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
            private = ec.generate_private_key(curves[algorithm])
            jwk = ECAlgorithm.to_jwk(private, as_dict=True)
        case _:
            private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            jwk = RSAAlgorithm.to_jwk(private, as_dict=True)
    public = {name: value for name, value in jwk.items() if name not in SECRET_MEMBERS}
    return SigningKey(algorithm, private, public | {"use": "sig", "key_ops": ["verify"]})


@dataclass
class FakeIssuer:
    """`keys` are published, by id; `fault` and `delay_s` are set while the server runs."""

    keys: dict[str, SigningKey] = field(default_factory=lambda: {"first": signing_key("EdDSA")})
    also_published: list[Any] = field(default_factory=list)
    """Further members of the key set, whatever they are."""
    fault: str | None = None
    delay_s: float = 0.0
    server: LoopbackServer = field(init=False)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def key_set_url(self) -> str:
        return self.server.url + KEY_SET_PATH

    @property
    def requests(self) -> list[Recorded]:
        return self.server.requests

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Those of user 7 of tenant acme, for five minutes; a change to None leaves one out."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "7",
            "tenant_id": "acme",
            "iat": now,
            "exp": now + 300,
        }
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(
        self,
        claims: Mapping[str, Any] | None = None,
        *,
        key_id: str = "first",
        key: SigningKey | None = None,
        header: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> str:
        """A token that it signed, with these claims or else the usual ones with changes."""
        key = key or self.keys[key_id]
        return jwt.encode(
            dict(self.claims(**changes) if claims is None else claims),
            key.private,
            algorithm=key.algorithm,
            headers={"kid": key_id} | dict(header or {}),
        )

    def key_set(self) -> dict[str, Any]:
        listed = [key.public | {"kid": key_id, "alg": key.algorithm} for key_id, key in self.keys.items()]
        return {"keys": [*self.also_published, *listed]}

    def answer(self, exchange: Exchange) -> None:
        if self.delay_s:
            exchange.hang(self.delay_s)
        path, _, again = exchange.path.partition("?")
        if self.fault is not None and not again:
            self._fail(exchange, self.fault)
        elif path == KEY_SET_PATH and exchange.command == "GET":
            exchange.send(200, self.key_set())
        else:
            exchange.send(404, {"error": "not found"})

    def _fail(self, exchange: Exchange, fault: str) -> None:
        whole = json.dumps(self.key_set()).encode()
        answers: dict[str, Callable[[], None]] = {
            "server_error": lambda: exchange.send(500, {"error": "down"}),
            "not_found": lambda: exchange.send(404, {"error": "moved"}),
            # To the same keys: followed, it would work.
            "redirect": lambda: exchange.send(302, b"", headers={"Location": self.key_set_url + "?again"}),
            "html": exchange.send_html,
            "no_json": lambda: exchange.send(200, whole[:-2]),
            "deep_json": lambda: exchange.send(200, b"[" * 100_000),
            "no_keys_member": lambda: exchange.send(200, {"jwks": self.key_set()["keys"]}),
            "keys_no_list": lambda: exchange.send(200, {"keys": {"0": self.key_set()["keys"][0]}}),
            "hang": exchange.hang,
            "reset": exchange.reset,
            "invalid_utf8": lambda: exchange.send(200, whole[:-1] + b', "x": "\xff"}'),
            "zipped": lambda: exchange.send(200, gzip.compress(whole), headers={"Content-Encoding": "gzip"}),
        }
        if fault in answers:
            answers[fault]()
            return
        exchange.begin_stream(media_type="application/json")
        match fault:
            case "endless":
                exchange.drip(b" " * 1_000_000, every_s=0.0)
            case "drip":
                exchange.drip(b" ")
            case "cut":
                exchange.stream(whole[:-10])
                exchange.cut()
            case _:
                raise ValueError(fault)


@contextmanager
def fake_issuer(**options: Any) -> Iterator[FakeIssuer]:
    """Run a FakeIssuer until the block ends."""
    fake = FakeIssuer(**options)
    with serving(fake.answer) as fake.server:
        yield fake
