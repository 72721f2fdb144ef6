"""`rag keys`: keys that the service signs with, keys of trusted services, and for whom those spoke."""

from __future__ import annotations

from typing import Annotated

import typer

from rag import screen
from rag.command import (
    AllTenantsOption,
    JsonOption,
    TenantOption,
    age_of,
    open_desk,
    print_rows,
    tags_of,
    tenant_of,
    words_of,
)

keys = typer.Typer(help="Keys of trusted services, and those that the service signs with.", no_args_is_help=True)


@keys.command("sign")
def keys_sign() -> None:
    """Print a new key for the service to sign with, once; it counts beside the others."""
    from rag import operate

    screen.print_json(f"RAG_SIGNING_KEY={operate.add_signing_key(open_desk())}")
    screen.err.print(
        "Give it to the service, restart that, and then retire the old key: `rag keys signing` lists them."
    )


@keys.command("signing")
def keys_signing(as_json: JsonOption = False) -> None:
    """List the keys that the service may sign with, oldest first; their secrets are shown to nobody."""
    with open_desk().session() as session:
        print_rows("signing_keys", session.rows("list_signing_keys", {}), as_json=as_json)


@keys.command("retire")
def keys_retire(
    key_id: Annotated[str, typer.Argument(help="The part of RAG_SIGNING_KEY before the full stop.")],
    yes: Annotated[bool, typer.Option("--yes", help="Even the last one.")] = False,
) -> None:
    """End a signing key: what was signed with it is worthless from the next statement on."""
    from rag import operate

    replaced = operate.retire_signing_key(open_desk(), key_id, even_last=yes)
    screen.out.print(f"Retired {screen.shown(key_id)}.")
    if replaced:
        screen.out.print("The embedded database signs with a new key; restart what runs on it.")


@keys.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    tenant: TenantOption = None,
    actions: Annotated[str, typer.Option(help="Comma-separated: query, ingest, delete.")] = "query",
    scopes: Annotated[str, typer.Option(help="Scopes to write, comma-separated: public, user, project.")] = "",
    tags: Annotated[str, typer.Option(help="Tags to assert and write, comma-separated; * for any.")] = "public",
    act_as: Annotated[bool, typer.Option("--act-as", help="It may name a user and a project.")] = False,
    user: Annotated[list[str] | None, typer.Option(help="A user that it may name; any unless given.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="A project that it may name; any unless given.")] = None,
    expires: Annotated[str, typer.Option(help="How long it is valid: 90d, 12h, 4w.")] = "90d",
) -> None:
    """Print a new key of a trusted service, once."""
    from rag import operate
    from rag.principal import check_user_id

    valid_for = age_of(expires, "expires")
    desk = open_desk()
    grant = operate.KeyGrant(
        tenant_id=tenant_of(tenant, desk.default_tenant),
        name=name,
        actions=words_of(actions),
        scopes=words_of(scopes),
        tags=None if tags == "*" else tags_of(tags),
        act_as=act_as,
        user_ids=tuple(map(check_user_id, user)) if user else None,
        project_ids=tuple(project) if project else None,
        valid_for=valid_for,
    )
    with desk.session() as session:
        key = operate.add_key(session, grant)
    screen.print_json(key.text)
    screen.err.print(f"Key {key.key_id} of tenant {screen.shown(grant.tenant_id)}, valid for {expires}.")


@keys.command("list")
def keys_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List the keys of trusted services, also those that ended."""
    with open_desk().session() as session:
        print_rows("keys", session.rows("list_keys", {"tenant_id": tenant}), as_json=as_json)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The 16 digits after rag_.")],
    tenant: AllTenantsOption = None,
) -> None:
    """End a key of a trusted service; the running service sees it within five seconds."""
    from rag import operate

    with open_desk().session() as session:
        for row in operate.revoke_key(session, key_id, tenant_id=tenant):
            screen.out.print(f"Revoked {screen.shown(row['name'])} of tenant {screen.shown(row['tenant_id'])}.")


@keys.command("audit")
def keys_audit(
    tenant: AllTenantsOption = None,
    since: Annotated[str, typer.Option(help="How far back: 7d, 24h.")] = "7d",
    top: Annotated[int, typer.Option(min=1, max=100_000, help="Rows, newest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List for whom trusted services spoke."""
    wanted = {"tenant_id": tenant, "since": age_of(since, "since"), "top": top}
    with open_desk().session() as session:
        print_rows("assertions", session.rows("list_assertions", wanted), as_json=as_json)
