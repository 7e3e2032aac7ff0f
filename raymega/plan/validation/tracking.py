"""Check the rules of the trackers, as far as the job file alone decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymega.errors import Fault
from raymega.plan.validation.rule import broken_rows, reads


@reads("tracking.trackers")
def tracker_count_faults(trackers: Sequence[str]) -> Iterator[Fault]:
    """Check that no tracker is named twice."""
    for name in dict.fromkeys(trackers):
        if trackers.count(name) > 1:
            yield Fault(
                fact=f"tracking.trackers names {name!r} {trackers.count(name)} times",
                rule="each tracker records the run once",
                remedy="remove one",
            )


@reads("tracking.trackers wandb_mode webhook_url")
def tracker_faults(trackers: Sequence[str], wandb_mode: str, webhook_url: str) -> Iterator[Fault]:
    """Check that settings of trackers belong to one that is chosen."""
    has_wandb, has_webhook = "wandb" in trackers, "webhook" in trackers
    named = f"tracking.trackers=[{', '.join(trackers)}]"
    yield from broken_rows([
        (wandb_mode != "offline" and not has_wandb,
         f"tracking.wandb_mode={wandb_mode} with {named}", "it has no effect without wandb",
         "add wandb to tracking.trackers, or leave tracking.wandb_mode out"),
        (webhook_url != "off" and not has_webhook,
         f"tracking.webhook_url is set, with {named}", "it has no effect without webhook",
         "add webhook to tracking.trackers, or leave tracking.webhook_url out"),
        (webhook_url == "off" and has_webhook,
         f"{named} and tracking.webhook_url=off", "a webhook has an address",
         "set tracking.webhook_url=https://HOST/PATH, or remove webhook"),
    ])  # fmt: skip
