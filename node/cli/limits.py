"""`skipstone limits`: what this machine's nodes may use."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from node.cli.views.output import announce, print_json
from node.context.options import setting
from node.observability.typed_json import to_json
from swarm.vocabulary.errors import ConfigError
from swarm.workload.limits import Limits

# Unit and meaning of each limit
MEANINGS: Final = {
    "upload": ("Mbit/s", "most bytes sent"),
    "download": ("Mbit/s", "most bytes received"),
    "month": ("GB", "most bytes a month, both ways; then the node pauses"),
    "temperature": ("°C", "above it the node computes less, and far above it pauses"),
    "power": ("W", "above it the node computes less"),
    "hours": ("", "hours of the week, as mon-fri 22:00-07:00, sat, sun"),
    "idle": ("min", "minutes without a key or the mouse before the node computes"),
    "battery": ("", "yes or no: whether to compute on battery"),
    "programs": ("", "names of programs beside which the node pauses, as steam,obs"),
}
YES, NO = ("yes", "true", "on"), ("no", "false", "off")


def limits(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="As upload=8 or battery=no; NAME= removes a limit."),
    ] = None,
    settings: Annotated[Path | None, setting("settings", "File to read and write [default: that of this user]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show or change what this machine's nodes may use. Running nodes follow within seconds."""
    from node.runtime.limits import changed, read_limits, settings_path, write_limits  # the sensors are slow to import

    path = settings or settings_path()
    announce(f"skipstone limits: {path}", as_json=json)
    current = read_limits(path)
    if changes:
        current = changed(current, dict(map(_change, changes)))
        write_limits(path, current)
    if json:
        print_json(to_json(current))
        return
    for name, (unit, meaning) in MEANINGS.items():
        typer.echo(f"  {name:12} {shown(getattr(current, name), unit):16} {meaning}")


def shown(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return YES[0] if value else NO[0]
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    return f"{value:g} {unit}" if isinstance(value, float | int) and value else value or "-"


def _change(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE. Raises ConfigError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{text!r} is not NAME=VALUE", hint="As in: skipstone limits upload=8 battery=no")
    default = next((each.default for each in dataclasses.fields(Limits) if each.name == name), "")
    if not value:
        return name, None
    if isinstance(default, bool):
        if value not in YES + NO:
            raise ConfigError(f"{name}={value}: say yes or no")
        return name, value in YES
    if isinstance(default, str | tuple):
        return name, value if isinstance(default, str) else [each.strip() for each in value.split(",")]
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(.*)", value)
    unit = MEANINGS[name][0]
    if match is None or match[2].lower() not in ("", unit.lower(), unit.lower().removesuffix("/s")):
        raise ConfigError(f"{name}={value} is not a number of {unit}")
    return name, float(match[1])
