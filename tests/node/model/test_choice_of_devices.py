"""Several devices of one node are of one kind, and each is there."""

from __future__ import annotations

import pytest
import torch

from node.model.device import MOST_DEVICES, choose_devices
from swarm.vocabulary.errors import ConfigError


def test_processor_cores_may_be_shared() -> None:
    assert choose_devices("cpu, cpu").value == (torch.device("cpu"), torch.device("cpu"))
    assert choose_devices("cpu").value == (torch.device("cpu"),)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("cpu,", "unknown"),
        ("cpu,quantum", "unknown"),
        (",".join(["cpu"] * (MOST_DEVICES + 1)), "17 devices"),
        ("cpu,cuda:99", "not there"),
    ],
)
def test_what_cannot_be(wish: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_devices(wish)


def test_gpus_are_each_named_once_and_not_mixed_with_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("cuda:0,cuda:1").value == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="named twice"):
        choose_devices("cuda,cuda:0")
    with pytest.raises(ConfigError, match="several kinds"):
        choose_devices("cuda:0,cpu")
