"""What the operator tells the server that runs on a data folder: `hearth trainers`, `hearth
replicas`, `hearth maintenance`."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Column, Table

from server.live import LiveServer
from server.settings import Settings

trainers = typer.Typer(no_args_is_help=True, help="The trainer groups: look, drain, move runs.")
replicas = typer.Typer(no_args_is_help=True, help="The vLLM servers: look, pause, drain, resume.")

Data = Annotated[Path | None, typer.Option(help="Folder for everything the server keeps.")]


class Mode(StrEnum):
    WAIT = "wait"
    KEEP = "keep"
    ABORT = "abort"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


@replicas.command("list")
def list_replicas(data: Data = None) -> None:
    """Show every replica and how it is."""
    _print(replica_table(_ask(data, lambda server: server.get("replicas"))))


@replicas.command()
def pause(
    name: str,
    mode: Annotated[
        Mode, typer.Option(help="Of what it generates: finish it, freeze it, or ask it again.")
    ] = Mode.WAIT,
    data: Data = None,
) -> None:
    """Send a replica nothing new."""
    _ask(data, lambda server: server.post(f"{_path(name)}/pause?mode={mode}"))


@replicas.command()
def drain(name: str, data: Data = None) -> None:
    """Send a replica nothing new and have it finish what it has, before it is taken away."""
    _ask(data, lambda server: server.post(f"{_path(name)}/drain"))


@replicas.command()
def resume(name: str, data: Data = None) -> None:
    """Send a replica requests again."""
    _ask(data, lambda server: server.post(f"{_path(name)}/resume"))


@trainers.command("list")
def list_trainers(data: Data = None) -> None:
    """Show every trainer group and how it is."""
    _print(trainer_table(_ask(data, lambda server: server.get("trainers"))))


@trainers.command("drain")
def drain_trainer(name: str, data: Data = None) -> None:
    """Give a trainer no runs, and have those that it has move to others."""
    _ask(data, lambda server: server.post(f"trainers/{quote(name, safe='')}/drain"))


@trainers.command("resume")
def resume_trainer(name: str, data: Data = None) -> None:
    """Give a trainer runs again."""
    _ask(data, lambda server: server.post(f"trainers/{quote(name, safe='')}/resume"))


@trainers.command()
def move(
    run: str,
    trainer: Annotated[
        str | None, typer.Argument(help="Where it goes; by default the least loaded other one.")
    ] = None,
    data: Data = None,
) -> None:
    """Have a run move at the end of the request that it is in."""
    path = f"runs/{quote(run, safe='')}/move"
    if trainer is not None:
        path += f"?trainer={quote(trainer, safe='')}"
    typer.echo(f"{run} goes to {_ask(data, lambda server: server.post(path))['trainer']}")


def maintenance(switch: Switch, data: Data = None) -> None:
    """On: requests are accepted and wait, and nothing new begins. Off: they go on."""
    _ask(data, lambda server: server.post(f"maintenance/{switch}"))


def trainer_table(rows: list[dict[str, Any]]) -> Table:
    """Trainer groups as `/operator/trainers` tells of them."""
    columns = ("runs", "waiting", "arrivals", "restarts", "ticks", "tokens")
    name, state = Column("trainer", no_wrap=True), Column("state", no_wrap=True)
    shown = Table(name, "base model", state, *columns, title="Trainers")
    for row in rows:
        restarts = max(row["generation"] - 1, 0)
        counts = (len(row["runs"]), row["waiting"], row["arrivals"], restarts)
        shown.add_row(
            *(row["name"], row["model"], row["state"]),
            *map(str, (*counts, row["ticks"], row["tokens"])),
        )
    return shown


def replica_table(rows: list[dict[str, Any]]) -> Table:
    """Replicas as `/operator/replicas` tells of them."""
    columns = ("load", "adapters", "restarts", "requests", "lost", "vLLM")
    address = Column("address", overflow="fold")
    # What the other commands are told: whole in a narrow window too.
    name, state = Column("replica", no_wrap=True), Column("state", no_wrap=True)
    shown = Table(name, "base model", state, *columns, address, title="Replicas")
    for row in rows:
        restarts = max(row["generation"] - 1, 0)
        counts = (row["load"], len(row["adapters"]), restarts, row["requests"])
        shown.add_row(
            *(row["name"], row["model"], row["state"]),
            *map(str, (*counts, row["lost_requests"])),
            *(row["version"] or "", row["url"] or ""),
        )
    return shown


def _print(table: Table) -> None:
    Console(emoji=False, markup=False).print(table)


def _path(name: str) -> str:
    return f"replicas/{quote(name, safe='')}"


def _ask(data: Path | None, call: Callable[[LiveServer], Any]) -> Any:
    folder = (Settings() if data is None else Settings(data=data)).data
    server = LiveServer.find(folder)
    try:
        answer = None if server is None else call(server)
    except HTTPError as error:
        raise _failed(json.load(error)["detail"]) from error
    if answer is None:
        raise _failed(f"no server runs on the data folder {folder}")
    return answer


def _failed(why: str) -> typer.Exit:
    typer.echo(f"hearth: {why}", err=True)
    return typer.Exit(1)
