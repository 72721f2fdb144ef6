"""`rag prompts`: what tenants tell the model, set from a file, shown and taken away."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from rag import screen
from rag.command import AllTenantsOption, JsonOption, TenantOption, open_desk, print_rows, tenant_of
from rag.errors import InvalidInput

prompts = typer.Typer(help="What tenants tell the model, before the rules that always hold.", no_args_is_help=True)


@prompts.command("set")
def prompts_set(
    file: Annotated[Path, typer.Argument(help="The text, in UTF-8; - for standard input.", metavar="FILE")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Instead of the service's introduction, and not after it.")
    ] = False,
    tenant: TenantOption = None,
) -> None:
    """Set what a tenant tells the model, from its next question on."""
    from rag.tenant_prompts import MAX_PROMPT_BYTES, set_prompt

    desk = open_desk()
    tenant_id = tenant_of(tenant, desk.default_tenant)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as given:
            # One byte more than permitted says that there is too much, however large it is.
            prompt = given.read(MAX_PROMPT_BYTES + 1).decode()
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", field="FILE") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the prompt is not UTF-8, or is longer than {MAX_PROMPT_BYTES} bytes", field="FILE"
        ) from error
    with desk.session() as session:
        generation = set_prompt(session, tenant_id=tenant_id, prompt=prompt, replaces=replace)
    screen.out.print(f"Tenant {screen.shown(tenant_id)} has its prompt, generation {generation}.")


@prompts.command("show")
def prompts_show(tenant: TenantOption = None) -> None:
    """Print what a tenant tells the model."""
    from rag.tenant_prompts import list_prompts

    desk = open_desk()
    tenant_id = tenant_of(tenant, desk.default_tenant)
    with desk.session() as session:
        found = list_prompts(session, tenant_id)
    if not found:
        raise InvalidInput("this tenant has no prompt: `rag prompts list` has all of them", field="tenant_id")
    for line in found[0]["prompt"].splitlines():
        screen.out.print(screen.shown(line))


@prompts.command("list")
def prompts_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List which tenants tell the model something, and how much; with --json also what."""
    from rag.tenant_prompts import list_prompts

    with open_desk().session() as session:
        found = list_prompts(session, tenant)
    if not as_json:
        found = [{name: value for name, value in row.items() if name != "prompt"} for row in found]
    print_rows("prompts", found, as_json=as_json)


@prompts.command("remove")
def prompts_remove(tenant: TenantOption = None) -> None:
    """Take a tenant's prompt away, from its next question on."""
    from rag.tenant_prompts import remove_prompt

    desk = open_desk()
    tenant_id = tenant_of(tenant, desk.default_tenant)
    with desk.session() as session:
        remove_prompt(session, tenant_id)
    screen.out.print(f"Tenant {screen.shown(tenant_id)} tells the model nothing of its own.")
