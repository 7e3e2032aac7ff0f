"""A stand-in for EC2: moto answers the API, and for each instance a machine of namespaces is booted.

An instance has its private and its public address on one card, knows its key pair's user, and dies when
it is terminated. What was asked of RunInstances is kept word for word, because moto forgets most of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlencode

import boto3

from rehearsal.hosts import GATEWAY, Host, Site

PORT, REGION, ZONE, NETWORK = 5000, "us-east-1", "us-east-1a", "10.78.0.0"
ENDPOINT = f"http://{GATEWAY}:{PORT}"
KEYS = {"aws_access_key_id": "rehearsal", "aws_secret_access_key": "rehearsal"}
SETTINGS = f"[default]\nregion = {REGION}\nendpoint_url = {ENDPOINT}\n"
SETTINGS += "".join(f"{key} = {value}\n" for key, value in KEYS.items())


class Cloud:
    """The API server, the account that docs/cluster.md describes, and the machines."""

    def __init__(self, site: Site, public_key: Callable[[], str]) -> None:
        """Open the account; ``public_key`` gives what may log in to an instance."""
        self.asked: list[dict[str, str]] = []  # RunInstances requests
        self.machines: dict[str, Host] = {}
        self._site, self._public_key, self._is_closed = site, public_key, threading.Event()
        self._ended: set[str] = set()
        site.add_route(f"{NETWORK}/16")
        self._server = self._serve()
        self.client = boto3.client("ec2", region_name=REGION, endpoint_url=ENDPOINT, **KEYS)
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def open_account(self) -> dict[str, str]:
        """Create what docs/cluster.md asks for before `ray up`, and return the ids to put into the cluster file."""
        # roles, a network, a security group: in the order of the page
        iam = boto3.client("iam", region_name=REGION, endpoint_url=ENDPOINT, **KEYS)
        for role in ("raymega-head", "raymega-worker"):
            iam.create_instance_profile(InstanceProfileName=role)
        ec2 = self.client
        vpc = ec2.create_vpc(CidrBlock=f"{NETWORK}/16")["Vpc"]["VpcId"]
        subnets = [
            ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=ZONE)["Subnet"][
                "SubnetId"
            ]
            for block in ("10.78.1.0/24", "10.78.2.0/24")
        ]
        for subnet in subnets:
            ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
        group = ec2.create_security_group(GroupName="raymega", Description="raymega", VpcId=vpc)
        image = ec2.describe_images()["Images"][0]["ImageId"]
        return {"image": image, "subnet": subnets[1], "group": group["GroupId"]}

    def instances(self, state: str = "running") -> list[dict[str, Any]]:
        """The account's instances in a state."""
        wanted = [{"Name": "instance-state-name", "Values": [state]}]
        pages = self.client.describe_instances(Filters=wanted)["Reservations"]
        return [instance for page in pages for instance in page["Instances"]]

    def living(self) -> list[Host]:
        """Machines of instances that run."""
        if not self._keeper.is_alive():
            raise RuntimeError("no machine boots or ends any more, for the reason printed above")
        names = {instance["InstanceId"] for instance in self.instances()}
        return [host for name, host in self.machines.items() if name in names]

    def close(self) -> None:
        """The machines are the site's to end."""
        self._is_closed.set()
        self._keeper.join()
        self._server.shutdown()

    def _serve(self) -> Any:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        app = DomainDispatcherApplication(create_backend_app)
        server = make_server(GATEWAY, PORT, self._listen(app), threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _listen(self, app: Callable) -> Callable:
        """``app``, with each RunInstances request written down."""

        def answer(environ: dict[str, Any], start_response: Callable) -> Iterator[bytes]:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if b"Action=RunInstances" in body:
                asked = dict(parse_qsl(body.decode()))
                self.asked.append(asked)
                # EC2 gives as many as there are up to MaxCount, moto gives MinCount.
                body = urlencode(asked | {"MinCount": asked["MaxCount"]}).encode()
            environ |= {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            return app(environ, start_response)

        return answer

    def _keep(self) -> None:
        """Boot and end machines as instances come and go."""
        while not self._is_closed.wait(1.0):
            running = {instance["InstanceId"]: instance for instance in self.instances()}
            for name in self.machines.keys() - running.keys() - self._ended:
                # EC2 gives an address that has become free to the next instance, and moto at once.
                self.machines[name].remove()
                self._ended.add(name)
            for name in running.keys() - self.machines.keys():
                self._boot(running[name])

    def _boot(self, instance: dict[str, Any]) -> None:
        name = f"i{len(self.machines)}"
        addresses = (instance["PrivateIpAddress"], instance["PublicIpAddress"])
        host = self._site.add_host(name, *addresses)
        host.run(f"mkdir -p .aws && printf %s '{SETTINGS}' > .aws/config")
        # as cloud-init does with the key pair of RunInstances
        host.run(f"echo '{self._public_key()}' > .ssh/authorized_keys")
        self.machines[instance["InstanceId"]] = host
