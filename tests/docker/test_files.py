"""The compose files and the image's run, as far as they can be judged without an engine."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.context.options import VARIABLES
from protocol.manifest.manifest import manifest_from_table

FOLDER = Path(__file__).parent.parent.parent / "docker"
OF_THE_ENTRYPOINT = {"SKIPSTONE_RUN", "SKIPSTONE_IDENTITIES", "SKIPSTONE_HOME"}
KNOWN_VARIABLES = VARIABLES | OF_THE_ENTRYPOINT
READ_BY_BOTH = re.findall(
    r"\w+",
    """build cap_drop command depends_on deploy environment image logging mem_limit network_mode pids_limit ports
    profiles read_only restart scale security_opt stop_grace_period tmpfs volumes""",
)


def compose(name: str) -> dict[str, Any]:
    table = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(table, dict)
    return table


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_both_composes_know_what_is_said(name: str) -> None:
    table = compose(name)
    assert {key for key in table if not key.startswith("x-")} <= {"services", "volumes"}
    for service in table["services"].values():
        assert set(service) <= set(READ_BY_BOTH)
        assert set(service.get("environment", ())) <= KNOWN_VARIABLES


def test_what_is_scaled_has_nothing_that_only_one_can_have() -> None:
    stage = compose("docker-compose.yml")["services"]["stage"]
    assert not {"container_name", "hostname", "ports"} & set(stage)
    assert not {"SKIPSTONE_IDENTITY", "SKIPSTONE_ADVERTISE", "SKIPSTONE_STAGE"} & set(stage["environment"])


@pytest.mark.parametrize("what", ["identities", "checkpoints"])
def test_each_service_keeps_its_own_apart(what: str) -> None:
    services = [each for each in compose("docker-compose.yml")["services"].values() if "profiles" not in each]
    mounts = [[mount.split(":")[0] for mount in service["volumes"] if what in mount] for service in services]
    assert len({name for (name,) in mounts}) == len(services)


def test_what_a_container_may_take_and_change_is_bounded() -> None:
    home = re.search(r"SKIPSTONE_HOME=(\S+)", (FOLDER / "Dockerfile").read_text())
    assert home is not None
    for service in compose("docker-compose.yml")["services"].values():
        assert service["mem_limit"]
        assert service["pids_limit"] <= 1024
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        if "network_mode" in service:  # Prometheus and Grafana write into themselves
            continue
        assert service["read_only"] is True
        writable = [mount.split(":")[0] for mount in service["tmpfs"]]
        assert str(Path(home[1]).parent) in writable, "where the entrypoint lays the link to its identity"


def test_only_the_first_node_writes_the_link() -> None:
    services = compose("docker-compose.yml")["services"]
    writable = {
        name for name, service in services.items() for mount in service["volumes"] if re.fullmatch(r"run:[^:]+", mount)
    }
    assert writable == {"bootstrap"}


def test_the_image_sets_what_nodes_read() -> None:
    said = set(re.findall(r"\b(SKIPSTONE_[A-Z_]+)=", (FOLDER / "Dockerfile").read_text()))
    assert said
    assert said <= KNOWN_VARIABLES


def test_the_demo_leaves_two_stage_nodes_for_each_stage() -> None:
    manifest = manifest_from_table(tomllib.loads((FOLDER / "demo.toml").read_text()))
    assert (manifest.stages.count - 1) * 2 == compose("docker-compose.yml")["services"]["stage"]["scale"]


def test_variables_in_the_documents_exist() -> None:
    for document in (FOLDER.parent / "docs").glob("*.md"):
        assert set(re.findall(r"SKIPSTONE_[A-Z_]+[A-Z]", document.read_text())) <= KNOWN_VARIABLES
