"""Tokens of end users: which are believed and what of them, and how the issuer's keys are kept."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from api.tokens import COOL_DOWN_S, LEEWAY_S, MAX_KEY_SET_BYTES, EndUser, KeySet, TokenVerifier
from rag.errors import AccessError, IssuerUnavailable, Unauthenticated
from rag.settings import Settings
from tests.fakes import refusing_url
from tests.fakes.issuer import AUDIENCE, FAULTS, FakeIssuer, SigningKey, fake_issuer, signing_key

# Far more than anything here takes; only what hangs is ended by it.
PATIENCE_S = 20.0
MALLORY = {algorithm: signing_key(algorithm, 666) for algorithm in ("EdDSA", "RS256", "ES256")}


@pytest.fixture
def issuer() -> Iterator[FakeIssuer]:
    keys = {"first": signing_key("EdDSA"), "rsa": signing_key("RS256"), "curve": signing_key("ES256")}
    with fake_issuer(keys=keys) as running:
        yield running


def trusting(issuer: FakeIssuer, **changes: Any) -> Settings:
    return Settings(
        _env_file=None,
        rag_jwt_issuer=issuer.url,
        rag_jwt_audience=AUDIENCE,
        rag_jwt_jwks_url=issuer.key_set_url,
        **changes,
    )


def verifier_of(issuer: FakeIssuer, *, patience: dict[str, float] | None = None, **changes: Any) -> TokenVerifier:
    """One that trusts an issuer; `patience` are the seconds of its KeySet."""
    settings = trusting(issuer, **changes)
    keys = KeySet(issuer.key_set_url, algorithms=settings.rag_jwt_algorithms, **(patience or {}))
    return TokenVerifier(settings, keys=keys)


@pytest.fixture
def verifier(issuer: FakeIssuer) -> TokenVerifier:
    return verifier_of(issuer)


async def refuses(verifier: TokenVerifier, token: str) -> bool:
    """Whether a token is refused, and in the words that say nothing."""
    try:
        await verifier.verify(token)
    except Unauthenticated as error:
        return error.message == "A valid credential is required."
    return False


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what comes by itself."""
    async with asyncio.timeout(PATIENCE_S):
        # An issuer that runs in a thread sets no event of this loop.
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_asked(issuer: FakeIssuer, *, times: int) -> None:
    """Wait until the issuer has been asked so often in all."""

    async def asked() -> bool:
        return len(issuer.requests) >= times

    await until(asked)


# --- what a token says ---------------------------------------------------------------------------


async def test_a_token_says_who_its_holder_is(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    token = issuer.token(projects=["orion", "lyra"], tags=["hr", "public", "hr"])
    assert await verifier.verify(token) == EndUser(
        tenant_id="acme",
        user_id=7,
        project_ids=frozenset({"orion", "lyra"}),
        tags=("hr", "public"),
        may_publish=False,
    )


async def test_what_a_token_does_not_say_gives_nothing(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    assert await verifier.verify(issuer.token(sub=None)) == EndUser(
        tenant_id="acme", user_id=None, project_ids=None, tags=("public",), may_publish=False
    )
    assert (await verifier.verify(issuer.token(projects=[]))).project_ids == frozenset()
    # As in the database, an empty list of tags is the tag public.
    assert (await verifier.verify(issuer.token(tags=[]))).tags == ("public",)


async def test_claims_may_have_other_names(issuer: FakeIssuer) -> None:
    verifier = verifier_of(
        issuer,
        rag_jwt_tenant_claim="https://example.com/org",
        rag_jwt_user_claim="uid",
        rag_jwt_projects_claim="teams",
        rag_jwt_tags_claim="groups",
    )
    own = {"https://example.com/org": "globex", "uid": 8, "teams": ["vega"], "groups": ["ops"]}
    # The usual names mean nothing then.
    usual = {"tenant_id": "acme", "sub": "auth0|7f3a", "projects": ["orion"], "tags": ["hr"]}
    user = await verifier.verify(issuer.token(**own, **usual))
    assert (user.tenant_id, user.user_id, user.project_ids, user.tags) == ("globex", 8, {"vega"}, ("ops",))


@pytest.mark.parametrize(
    ("roles", "publishes"),
    [
        (["editor"], True),
        (["reader", "editor"], True),
        ("openid editor profile", True),
        ("editor", True),
        (["reader"], False),
        (["Editor"], False),
        (["editors"], False),
        ("editors", False),
        ("rag:editor", False),
        ([["editor"]], False),
        ({"editor": True}, False),
        (True, False),
        ([], False),
        ("", False),
        (None, False),
    ],
)
async def test_only_the_role_that_is_set_publishes(issuer: FakeIssuer, roles: Any, publishes: bool) -> None:
    token = issuer.token(groups=roles)
    editors = verifier_of(issuer, rag_jwt_roles_claim="groups", rag_jwt_publisher_role="editor")
    assert (await editors.verify(token)).may_publish is publishes
    nobody = verifier_of(issuer, rag_jwt_roles_claim="groups")
    assert (await nobody.verify(token)).may_publish is False


@pytest.mark.parametrize("key_id", ["first", "rsa", "curve"])
async def test_each_kind_of_key_signs(issuer: FakeIssuer, verifier: TokenVerifier, key_id: str) -> None:
    assert (await verifier.verify(issuer.token(key_id=key_id))).user_id == 7


@pytest.mark.parametrize("algorithm", ["RS384", "RS512", "PS256", "PS384", "PS512", "ES384", "ES512"])
@pytest.mark.parametrize("named", [True, False])
async def test_other_algorithms_are_taken_when_they_are_set(issuer: FakeIssuer, algorithm: str, named: bool) -> None:
    key = signing_key(algorithm)
    issuer.keys = {}
    # A key that does not say for which algorithm it is serves for those that are set.
    issuer.also_published = [key.public | {"kid": "first"} | ({"alg": algorithm} if named else {})]
    token = issuer.token(key=key)
    assert (await verifier_of(issuer, rag_jwt_algorithms={algorithm}).verify(token)).user_id == 7
    assert await refuses(verifier_of(issuer), token)


async def test_a_clock_may_be_wrong_by_a_minute(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    assert LEEWAY_S == 60
    now = int(time.time())
    for claims in ({"exp": now - 30}, {"nbf": now + 30}, {"iat": now + 30}):
        assert (await verifier.verify(issuer.token(**claims))).user_id == 7
    for claims in ({"exp": now - 61}, {"nbf": now + 90}, {"iat": now + 90}):
        assert await refuses(verifier, issuer.token(**claims))


async def test_several_audiences_may_be_named_and_times_may_have_fractions(
    issuer: FakeIssuer, verifier: TokenVerifier
) -> None:
    token = issuer.token(aud=["another", AUDIENCE], exp=time.time() + 60.5, nbf=time.time() - 0.5)
    assert (await verifier.verify(token)).user_id == 7


@pytest.mark.parametrize("kind", ["JWT", "jwt", "at+jwt", "application/at+jwt", None])
async def test_a_token_for_access_is_taken(issuer: FakeIssuer, verifier: TokenVerifier, kind: str | None) -> None:
    assert (await verifier.verify(issuer.token(header={"typ": kind} if kind else {"typ": ""}))).user_id == 7


# --- what is refused -----------------------------------------------------------------------------

# Of claims that are signed as they should be. `...` leaves the claim out.
BAD_CLAIMS: list[dict[str, Any]] = [
    *({"exp": value} for value in (0, -1, 1, 1.5, False, True, "", "never", "99999999999", [], {}, ..., -1e308)),
    *({"exp": value} for value in (float("inf"), float("-inf"), float("nan"), [99999999999], "9" * 5000)),
    *({"nbf": value} for value in (99999999999, "0", "99999999999", True, None, [], float("inf"), 1e300)),
    *({"iat": value} for value in (99999999999, "0", "", True, None, {}, float("nan"))),
    *({"iss": value} for value in (..., "", "http://127.0.0.1", "HTTP://127.0.0.1", None, 7, True, {}, [])),
    *({"aud": value} for value in (..., "", "Palisade", "palisad", "palisade ", None, 7, [], {}, ["other"])),
    *({"aud": value} for value in ([[AUDIENCE]], {AUDIENCE: True}, ["other", 7], f"other {AUDIENCE}", [AUDIENCE, 7])),
    *({"tenant_id": value} for value in (..., "", " ", "acme ", "a\0b", "a\nb", "x" * 129, None, 7, True, ["acme"])),
    *({"tenant_id": value} for value in ({"id": "acme"}, "\ud800", "acme\u0085")),
    *({"sub": value} for value in ("", "0", "-7", "07", " 7", "7 ", "7.0", "0x7", "1e3", "７", "mara", "7" * 19)),
    *({"sub": value} for value in (7, True, ["7"], {"id": 7}, "7\0", "7,8", "*", "null")),
    *({"projects": value} for value in ("orion", None, 7, {"orion": True}, [None], [7], [["orion"]], [""], ["a\0"])),
    *({"projects": value} for value in ([" orion"], ["x" * 129], [True], [{}])),
    *({"tags": value} for value in ("public", None, 7, {"public": True}, [None], [7], [["public"]], [""], ["a\0"])),
    *({"tags": value} for value in (["x" * 65], [True], [f"{number}" for number in range(257)])),
]
BAD_HEADERS: list[dict[str, Any]] = [
    *({"kid": value} for value in ("", "FIRST", "first ", "first\0", "../first", "../../../../dev/null", "/dev/null")),
    *({"kid": value} for value in ("' or '1'='1", "first' --", "http://127.0.0.1/keys.json", "x" * 4000, "*", "rsa")),
    *({"crit": value} for value in (["b64"], ["exp"], [], "exp", None, {}, ["http://example.com/unknown"])),
    *({"crit": ["b64"], "b64": value} for value in (True, False, None)),
    *({"typ": value} for value in ("logout+jwt", "dpop+jwt", "JOSE", "secevent+jwt", "JWT ", 7, ["JWT"], True)),
]


def encoded(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def signed(header: object, claims: object, key: SigningKey) -> str:
    """A token of any two values, signed as they should be."""
    message = f"{encoded(header)}.{encoded(claims)}"
    # The library refuses to make some of these, and so may an issuer that is no library.
    sign = jwt.get_algorithm_by_name(key.algorithm).sign
    return f"{message}.{encoded(sign(message.encode(), key.private))}"


def with_claims(issuer: FakeIssuer, changes: dict[str, Any]) -> str:
    claims = issuer.claims()
    for name, value in changes.items():
        if value is ...:
            del claims[name]
        else:
            claims[name] = value
    return signed({"alg": "EdDSA", "kid": "first", "typ": "JWT"}, claims, issuer.keys["first"])


def with_header(issuer: FakeIssuer, changes: dict[str, Any]) -> str:
    header = {"alg": "EdDSA", "kid": "first", "typ": "JWT"} | changes
    return signed(header, issuer.claims(), issuer.keys["first"])


async def test_what_signs_these_is_believed_when_nothing_is_changed(
    issuer: FakeIssuer, verifier: TokenVerifier
) -> None:
    assert (await verifier.verify(with_claims(issuer, {}))).user_id == 7
    assert (await verifier.verify(with_header(issuer, {}))).user_id == 7


async def test_every_claim_that_is_missing_or_wrong_is_refused(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    believed = [changes for changes in BAD_CLAIMS if not await refuses(verifier, with_claims(issuer, changes))]
    assert believed == []


async def test_every_header_that_means_something_else_is_refused(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    believed = [changes for changes in BAD_HEADERS if not await refuses(verifier, with_header(issuer, changes))]
    assert believed == []


@pytest.mark.parametrize("key_id", [None, 7, True, ["first"], {"first": True}, 1.0])
async def test_a_key_id_of_another_type_is_refused(issuer: FakeIssuer, verifier: TokenVerifier, key_id: object) -> None:
    assert await refuses(verifier, with_header(issuer, {"kid": key_id}))


async def test_a_token_without_a_key_id_is_refused(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    issuer.keys = {"first": issuer.keys["first"]}
    header = {"alg": "EdDSA", "typ": "JWT"}
    assert await refuses(verifier, signed(header, issuer.claims(), issuer.keys["first"]))
    # Nor is the issuer asked for the sake of it.
    assert issuer.requests == []


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "nOnE", "", "HS256", "eddsa", "EdDSA ", None, 7, ["EdDSA"]]
)
async def test_an_algorithm_that_is_not_allowed_is_refused(
    issuer: FakeIssuer, verifier: TokenVerifier, algorithm: object
) -> None:
    message = f"{encoded({'alg': algorithm, 'kid': 'first'})}.{encoded(issuer.claims())}"
    for signature in ("", "AA", issuer.token().rpartition(".")[2]):
        assert await refuses(verifier, f"{message}.{signature}")


def public_forms(key: SigningKey) -> list[bytes]:
    """A public key in the forms in which it might be confused with a shared secret."""
    public = key.private.public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    raw = base64.urlsafe_b64decode(str(key.public.get("x") or key.public["n"]) + "==")
    return [pem, pem.strip(), der, raw, json.dumps(key.public).encode(), b""]


def signed_with_a_public_key(issuer: FakeIssuer) -> Iterator[str]:
    """Where the token chooses the algorithm, a public key is a shared secret, which everybody knows."""
    for key_id, key in issuer.keys.items():
        for algorithm in ("HS256", "HS384", "HS512"):
            message = f"{encoded({'alg': algorithm, 'kid': key_id, 'typ': 'JWT'})}.{encoded(issuer.claims())}"
            for secret in public_forms(key):
                digest = hmac.digest(secret, message.encode(), algorithm.replace("HS", "sha"))
                yield f"{message}.{encoded(digest)}"


async def test_a_public_key_is_no_shared_secret(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    for token in signed_with_a_public_key(issuer):
        assert await refuses(verifier, token)


async def test_no_key_serves_for_the_algorithm_of_another(issuer: FakeIssuer) -> None:
    everything = {"EdDSA", "RS256", "RS512", "PS256", "ES256", "ES384"}
    verifier = verifier_of(issuer, rag_jwt_algorithms=everything)
    # The key set says RS256; the same RSA key could sign the others.
    private = issuer.keys["rsa"].private
    for algorithm in ("RS512", "PS256"):
        assert await refuses(verifier, issuer.token(key_id="rsa", key=SigningKey(algorithm, private, {})))
    for key_id, algorithm in (("first", "ES256"), ("curve", "EdDSA"), ("curve", "ES384"), ("rsa", "EdDSA")):
        assert await refuses(verifier, issuer.token(key_id=key_id, key=MALLORY.get(algorithm, signing_key("ES384"))))


@pytest.mark.parametrize("algorithm", ["EdDSA", "RS256", "ES256"])
async def test_a_key_that_the_token_brings_along_is_not_looked_at(
    issuer: FakeIssuer, verifier: TokenVerifier, algorithm: str
) -> None:
    mallory = MALLORY[algorithm]
    with fake_issuer(keys={"first": mallory}) as elsewhere:
        for key_id in ("first", "curve", "rsa", "hers"):
            jwk = mallory.public | {"kid": key_id, "alg": algorithm}
            for header in (
                {},
                {"jwk": jwk},
                {"jku": elsewhere.key_set_url},
                {"x5u": elsewhere.key_set_url},
                {"x5c": ["MIIB"]},
                {"jku": elsewhere.key_set_url, "jwk": jwk, "iss": elsewhere.url},
            ):
                token = issuer.token(key_id=key_id, key=mallory, header=header)
                assert await refuses(verifier, token)
        assert elsewhere.requests == []


async def test_what_is_no_signed_token_is_refused(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    token = issuer.token()
    header, claims, signature = token.split(".")
    for text in (
        "",
        ".",
        "..",
        "...",
        header,
        f"{header}.{claims}",
        f"{header}.{claims}.",
        f"{header}..{signature}",
        f".{claims}.{signature}",
        f"{token}.{signature}",
        f"{header}.{claims}.{signature}.{claims}.{signature}",
        f"{token}=",
        f"{token}==",
        f"{token}\n",
        f" {token}",
        f"{token} {token}",
        token.replace(".", ".."),
        json.dumps({"protected": header, "payload": claims, "signature": signature}),
        signed([], issuer.claims(), issuer.keys["first"]),
        signed("EdDSA", issuer.claims(), issuer.keys["first"]),
        signed(b"[" * 5000, issuer.claims(), issuer.keys["first"]),
        signed(b'{"alg":"EdDSA"', issuer.claims(), issuer.keys["first"]),
        *(
            signed({"alg": "EdDSA", "kid": "first"}, payload, issuer.keys["first"])
            for payload in ([], "sub", 7, None, b"", b"{", b"\xff", b"[" * 5000, b'{"exp": ' + b"9" * 5000 + b"}")
        ),
    ):
        assert await refuses(verifier, text), text


def corrupted(token: str, chance: random.Random) -> str:
    """A token with one thing changed in its text."""
    place = chance.randrange(len(token))
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=+/ \x00\xff"
    match chance.randrange(6):
        case 0:
            return token[:place] + chance.choice(alphabet.replace(token[place], "")) + token[place + 1 :]
        case 1:
            return token[:place] + token[place + 1 :]
        case 2:
            return token[:place] + chance.choice(alphabet) + token[place:]
        case 3:
            return token[:place]
        case 4:
            return token[:place] + token[place:].swapcase()
        case _:
            return token[place:] + token[:place]


def forged(issuer: FakeIssuer, chance: random.Random) -> str:
    """A token that this issuer did not sign as it stands, or whose claims must not be believed."""
    key_id = chance.choice(["first", "rsa", "curve"])
    mallory = chance.choice(list(MALLORY.values()))
    token = issuer.token(key_id=key_id, sub=str(chance.randrange(1, 100)))
    header, claims, signature = token.split(".")
    other = issuer.claims(sub=str(chance.randrange(100, 200)), tenant_id=chance.choice(["acme", "globex"]))
    match chance.randrange(8):
        case 0:
            return f"{header}.{encoded(other)}.{signature}"
        case 1:
            return f"{header}.{claims}.{encoded(chance.randbytes(chance.choice([0, 1, 32, 63, 64, 65, 256])))}"
        case 2:
            return issuer.token(other, key_id=chance.choice([key_id, "hers"]), key=mallory)
        case 3:
            return with_claims(issuer, chance.choice(BAD_CLAIMS))
        case 4:
            return with_header(issuer, chance.choice(BAD_HEADERS))
        case 5:
            swapped = encoded(json.loads(base64.urlsafe_b64decode(header + "==")) | {"kid": chance.randbytes(4).hex()})
            return f"{swapped}.{claims}.{signature}"
        case 6:
            return ".".join(encoded(chance.randbytes(chance.randrange(1, 80))) for _ in range(3))
        case _:
            return chance.choice(list(signed_with_a_public_key(issuer)))


async def test_no_forged_or_changed_token_is_believed(
    issuer: FakeIssuer, verifier: TokenVerifier, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    cases = scaled(test=2_000, ci=20_000, prove=500_000)
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    began = time.monotonic()
    believed = refused = 0
    for number in range(cases):
        if number % 20 == 0:
            # What refuses everything would refuse these as well.
            assert (await verifier.verify(issuer.token(key_id=chance.choice(["first", "curve"])))).user_id == 7
        if number % 2:
            token = forged(issuer, chance)
        else:
            whole = issuer.token(key_id=chance.choice(["first", "curve"]))
            while (token := corrupted(whole, chance)) == whole:
                pass
        if not await refuses(verifier, token):
            believed += 1
        else:
            refused += 1
    assert (believed, refused) == (0, cases), f"seed {seed}"
    # Thousands of made-up key ids among them.
    assert len(issuer.requests) <= 2 + (time.monotonic() - began) / COOL_DOWN_S
    figure(
        f"{cases:,} forged or changed tokens: {believed} believed, {len(issuer.requests)} requests to the issuer "
        f"(seed {seed})"
    )


# --- the issuer's keys ---------------------------------------------------------------------------


async def test_keys_are_asked_for_once(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    for _ in range(50):
        await verifier.verify(issuer.token())
    (request,) = issuer.requests
    assert (request.method, request.path) == ("GET", "/keys.json")
    assert "authorization" not in request.headers
    assert request.headers["accept-encoding"] == "identity"


async def test_many_at_once_ask_once(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    issuer.delay_s = 0.2
    tokens = [issuer.token(sub=str(number)) for number in range(1, 51)]
    users = await asyncio.gather(*map(verifier.verify, tokens))
    assert [user.user_id for user in users] == list(range(1, 51))
    assert len(issuer.requests) == 1


async def test_one_who_gives_up_does_not_take_the_answer_from_the_others(
    issuer: FakeIssuer, verifier: TokenVerifier
) -> None:
    issuer.delay_s = 0.2
    waiting = [asyncio.create_task(verifier.verify(issuer.token())) for _ in range(3)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    assert [user.user_id for user in await asyncio.gather(*waiting[1:])] == [7, 7]
    assert waiting[0].cancelled()


async def test_a_flood_of_unknown_keys_is_no_flood_of_requests(
    issuer: FakeIssuer, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    count = scaled(test=2_000, ci=10_000, prove=100_000)
    verifier = verifier_of(issuer, patience={"cool_down_s": 0.1})
    began = time.monotonic()
    tokens = (issuer.token(key_id=f"made-up-{number}", key=MALLORY["EdDSA"]) for number in range(count))
    for token in tokens:
        assert await refuses(verifier, token)
    assert 2 <= len(issuer.requests) <= 2 + (time.monotonic() - began) / 0.1
    assert (await verifier.verify(issuer.token())).user_id == 7
    figure(f"{count:,} unknown key ids: {len(issuer.requests)} requests to the issuer")


async def test_who_has_a_known_key_does_not_wait_for_the_issuer(issuer: FakeIssuer) -> None:
    verifier = verifier_of(issuer, patience={"refresh_s": 0.0, "cool_down_s": 0.0, "timeout_s": 60.0})
    await verifier.verify(issuer.token())
    issuer.fault = "hang"
    await verifier.verify(issuer.token())
    await until_asked(issuer, times=2)
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(20):
            await verifier.verify(issuer.token())
    # That one was under way all the time.
    assert len(issuer.requests) == 2
    await verifier.keys.close()


async def test_a_key_that_is_announced_before_it_is_used_is_never_missing(
    issuer: FakeIssuer, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    rotations = scaled(test=5, ci=20, prove=500)
    verifier = verifier_of(issuer, patience={"refresh_s": 0.01, "cool_down_s": 0.01})
    signing = "first"
    ended = False
    believed = 0

    async def call() -> None:
        nonlocal believed
        while not ended:
            assert (await verifier.verify(issuer.token(key_id=signing))).user_id == 7
            believed += 1
            await asyncio.sleep(0)

    callers = [asyncio.create_task(call()) for _ in range(8)]
    for number in range(rotations):
        before, after = signing, f"key-{number}"
        known = len(issuer.requests)
        issuer.keys = issuer.keys | {after: signing_key("EdDSA", number)}
        # One may be under way; of those that follow, the first brings the key and the second comes after it.
        await until_asked(issuer, times=known + 2)
        signing = after
        await until_asked(issuer, times=known + 4)
        issuer.keys = {name: key for name, key in issuer.keys.items() if name != before}
    ended = True
    await asyncio.gather(*callers)
    figure(f"{believed:,} requests during {rotations} announced rotations of the issuer's key: 0 refused")


async def test_a_key_that_comes_unannounced_is_known_after_the_cool_down(issuer: FakeIssuer) -> None:
    verifier = verifier_of(issuer, patience={"cool_down_s": 0.3})
    await verifier.verify(issuer.token())
    issuer.keys = {"second": signing_key("EdDSA", 1)}
    token = issuer.token(key_id="second")

    async def believed() -> bool:
        return not await refuses(verifier, token)

    await until(believed)
    assert await refuses(verifier, issuer.token(key_id="first", key=signing_key("EdDSA")))


async def test_a_key_that_is_withdrawn_ends(issuer: FakeIssuer) -> None:
    verifier = verifier_of(issuer, patience={"refresh_s": 0.05, "cool_down_s": 0.0})
    token = issuer.token()
    await verifier.verify(token)
    issuer.keys = {}
    await until(lambda: refuses(verifier, token))


@pytest.mark.parametrize("fault", FAULTS)
async def test_keys_outlive_a_failing_issuer_for_a_while_and_no_longer(issuer: FakeIssuer, fault: str) -> None:
    verifier = verifier_of(issuer, patience={"refresh_s": 0.0, "stale_s": 0.4, "cool_down_s": 0.05, "timeout_s": 0.2})
    token = issuer.token()
    began = time.monotonic()
    await verifier.verify(token)
    asked = len(issuer.requests)
    issuer.fault = fault

    async def known() -> bool:
        try:
            await verifier.verify(token)
        except IssuerUnavailable:
            return False
        return True

    async def unknown() -> bool:
        return not await known()

    await until(unknown)
    assert time.monotonic() - began >= 0.4
    assert len(issuer.requests) > asked
    issuer.fault = None
    await until(known)
    await verifier.keys.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_keys_a_token_is_neither_believed_nor_refused(issuer: FakeIssuer, fault: str) -> None:
    verifier = verifier_of(issuer, patience={"cool_down_s": 0.0, "timeout_s": 0.2})
    issuer.fault = fault
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(issuer.token())
    # What no key could make good is refused all the same.
    assert await refuses(verifier, "no.token.atall")
    assert await refuses(verifier, with_header(issuer, {"alg": "none"}))
    assert len(issuer.requests) == 1
    issuer.fault = None
    assert (await verifier.verify(issuer.token())).user_id == 7


async def test_an_issuer_that_is_not_there_stops_nobody_from_starting(issuer: FakeIssuer) -> None:
    keys = KeySet(refusing_url() + "/keys.json", algorithms={"EdDSA"})
    await keys.load()
    with pytest.raises(IssuerUnavailable):
        await TokenVerifier(trusting(issuer), keys=keys).verify(issuer.token())


async def test_a_request_that_is_under_way_ends_with_the_service(issuer: FakeIssuer) -> None:
    issuer.fault = "hang"
    keys = KeySet(issuer.key_set_url, algorithms={"EdDSA"}, timeout_s=60.0)
    loading = asyncio.create_task(keys.load())
    await until_asked(issuer, times=1)
    async with asyncio.timeout(PATIENCE_S):
        await keys.close()
    assert [type(error) for error in await asyncio.gather(loading, return_exceptions=True)] == [asyncio.CancelledError]


def small_rsa_key() -> SigningKey:
    private = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return SigningKey("RS256", private, RSAAlgorithm.to_jwk(private.public_key(), as_dict=True))


@pytest.mark.parametrize(
    ("key", "published"),
    [
        pytest.param(signing_key("EdDSA", 1), {"use": "enc"}, id="for encryption"),
        pytest.param(signing_key("EdDSA", 1), {"key_ops": ["sign"]}, id="for signing only"),
        pytest.param(signing_key("EdDSA", 1), {"key_ops": "verify"}, id="for no list of purposes"),
        pytest.param(signing_key("EdDSA", 1), {"alg": "RS256"}, id="of another algorithm"),
        pytest.param(signing_key("EdDSA", 1), {"alg": None}, id="of no algorithm"),
        pytest.param(signing_key("EdDSA", 1), {"kid": "Second"}, id="with another id"),
        pytest.param(signing_key("EdDSA", 1), {"kid": 2}, id="with a number"),
        pytest.param(signing_key("EdDSA", 1), {"x": "AAAA"}, id="too short"),
        pytest.param(signing_key("EdDSA", 1), {"x": 7}, id="a number"),
        pytest.param(signing_key("EdDSA", 1), {"x": "é"}, id="no base64"),
        pytest.param(signing_key("EdDSA", 1), {"kty": "oct", "k": "c2VjcmV0"}, id="a shared secret"),
        pytest.param(signing_key("EdDSA", 1), {"kty": ["OKP"]}, id="of no kind"),
        pytest.param(
            signing_key("EdDSA", 1),
            {"d": encoded(signing_key("EdDSA", 1).private.private_bytes_raw())},
            id="with its secret half",
        ),
        pytest.param(signing_key("RS256", 1), {"e": "AA"}, id="with exponent 0"),
        pytest.param(signing_key("RS256", 1), {"n": "AQ"}, id="with modulus 1"),
        pytest.param(small_rsa_key(), {}, id="of 1,024 bits"),
        pytest.param(signing_key("ES256", 1), {"y": signing_key("ES256", 2).public["y"]}, id="not on the curve"),
        pytest.param(signing_key("ES256", 1), {"crv": "P-384"}, id="of another curve"),
        pytest.param(signing_key("ES384", 1), {}, id="of a curve that is not allowed"),
    ],
)
async def test_a_key_that_is_not_for_this_serves_for_nothing_and_disturbs_none(
    issuer: FakeIssuer, verifier: TokenVerifier, key: SigningKey, published: dict[str, Any]
) -> None:
    issuer.also_published = [key.public | {"kid": "second"} | published]
    assert await refuses(verifier, signed({"alg": key.algorithm, "kid": "second"}, issuer.claims(), key))
    assert (await verifier.verify(issuer.token())).user_id == 7


async def test_what_is_no_key_is_passed_over(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    issuer.also_published = [None, 7, "key", [], {}, {"kid": "first"}, {"kty": "RSA", "kid": "x"}, {"keys": []}]
    assert (await verifier.verify(issuer.token())).user_id == 7


async def test_the_first_of_two_keys_with_one_id_counts(issuer: FakeIssuer, verifier: TokenVerifier) -> None:
    issuer.also_published = [MALLORY["RS256"].public | {"kid": "first", "alg": "RS256"}]
    # Of different kinds they do not stand in each other's way (RFC 7517, 4.5).
    assert (await verifier.verify(issuer.token())).user_id == 7
    assert (await verifier.verify(issuer.token(key=MALLORY["RS256"]))).user_id == 7
    issuer.also_published.append(MALLORY["RS256"].public | {"kid": "rsa", "alg": "RS256"})
    again = verifier_of(issuer)
    assert await refuses(again, issuer.token(key_id="rsa"))


async def test_a_key_set_is_read_up_to_a_limit(issuer: FakeIssuer) -> None:
    whole = len(json.dumps(issuer.key_set()))
    issuer.also_published = [{"pad": "x" * (MAX_KEY_SET_BYTES - whole - 100)}]
    assert (await verifier_of(issuer).verify(issuer.token())).user_id == 7
    issuer.also_published = [{"pad": "x" * (MAX_KEY_SET_BYTES - whole)}]
    with pytest.raises(IssuerUnavailable):
        await verifier_of(issuer).verify(issuer.token())


@pytest.mark.parametrize("missing", ["rag_jwt_issuer", "rag_jwt_audience", "rag_jwt_jwks_url"])
def test_a_token_is_never_believed_without_all_that_it_is_compared_with(issuer: FakeIssuer, missing: str) -> None:
    with pytest.raises(AccessError, match="must be set together"):
        TokenVerifier(trusting(issuer).model_copy(update={missing: None}))


@pytest.mark.parametrize("url", ["https://id.example:port/", "https://id\n.example/", "https://" + "x" * 70_000])
def test_an_address_that_is_none_is_refused_at_the_start(issuer: FakeIssuer, url: str) -> None:
    with pytest.raises(AccessError, match="RAG_JWT_JWKS_URL is not an address"):
        TokenVerifier(trusting(issuer).model_copy(update={"rag_jwt_jwks_url": url}))
