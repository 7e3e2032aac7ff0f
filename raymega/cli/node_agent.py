"""`raymega node-agent`: looks after one node of a cluster and tells Ray when it is taken back."""

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
    """Drain this node when its cloud takes it back, so that runs save and leave in time.

    Asks AWS (spot notices, IMDSv2) or Google (preemption) every few seconds. With a COMMAND it is its
    parent, and a SIGTERM, as Kubernetes sends it, drains first and ends the command when the time is up.

    Options:
        command: Ray's start, run as a child: -- ray start --block ..
        address: HOST:PORT of the cluster's head.
        provider: Whose notices: auto, aws, gcp or none (Kubernetes: SIGTERM).
        metadata: URL of the metadata service; default: where it always is.
        node_id: Ray's id of the node; default: the one with this address.
        grace_s: How long after a SIGTERM this process may live.
        poll_s: Seconds between questions.

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
