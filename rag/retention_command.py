"""`rag maintain --retention`: what is too old goes, in small batches."""

from __future__ import annotations

import json
from dataclasses import asdict

from rag import screen
from rag.command import open_desk, print_rows, read_settings
from rag.retain import BATCH, Expired, count, expire, terms


def retention(*, dry_run: bool, as_json: bool) -> None:
    """Remove what the settings say is too old, or with `dry_run` count it."""
    wanted = terms(read_settings())
    desk = open_desk()
    report = []
    for term in wanted:
        found = count(desk, term)
        removed = 0
        if found and not dry_run:
            # By batches: a bar that moves with every row would move no further.
            with screen.counting(-(-found // BATCH), f"removing {term.kind}") as counter:

                def tell(done: int, counter: screen.Counter = counter, what: str = term.kind) -> None:
                    counter.note(f"{done} {what}")
                    if done:
                        counter.step()

                removed = expire(desk, term, tell)
        report.append(Expired(kind=term.kind, older_than_days=term.older_than.days, found=found, removed=removed))
    rows = [asdict(each) for each in report]
    if as_json:
        screen.print_json(json.dumps({"dry_run": dry_run, "retention": rows}))
    else:
        print_rows("retention", rows, as_json=False)
