"""Command `raymega node-agent`: drains a node in Ray when its cloud announces a preemption."""

from __future__ import annotations

from typing import Annotated

import typer

from raymega.orchestrate.cluster.node_agent import POLL_S, NodeAgent
from raymega.orchestrate.cluster.preemption_notices import asker, choose_provider
from raymega.session import set_environment


def node_agent(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]")] = None,
    address: str = "",
    provider: str = "auto",
    metadata: str = "",
    node_id: str = "",
    grace_s: Annotated[float, typer.Option(min=0)] = 30.0,
    poll_s: Annotated[float, typer.Option(min=0.1)] = POLL_S,
) -> None:
    """Drain this node when its cloud preempts it, so that runs save and leave it in time.

    Polls AWS (spot notices, IMDSv2) or Google (preemption) every few seconds. With a COMMAND, which it
    starts as a child, a SIGTERM (as Kubernetes sends) first drains the node and later ends the command.

    Options:
        command: Command that starts Ray, run as a child: -- ray start --block ..
        address: Address of the cluster's head, HOST:PORT.
        provider: Source of notices: auto, aws, gcp or none (Kubernetes: SIGTERM).
        metadata: URL of the metadata service; default: the provider's own.
        node_id: Node id in Ray; default: the node with this machine's address.
        grace_s: Seconds that this process may live after a SIGTERM.
        poll_s: Seconds between two polls.

    Example: raymega node-agent --address 10.0.0.1:6379
    Example: raymega node-agent --address $HEAD:6379 --provider none -- ray start --block --address=$HEAD:6379
    """
    set_environment(is_private=False)
    chosen = choose_provider(provider)
    agent = NodeAgent(
        address=address,
        ask=asker(chosen, address=metadata),
        node_id=node_id,
        command=command or (),
        grace_s=grace_s,
        poll_s=poll_s,
    )
    raise typer.Exit(agent.run())
