"""The `hearth` command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from server import operate, serving
from server.doctor import print_report
from server.settings import Settings
from server.store.database import Database, sqlite_url
from server.store.migrate import migrate
from server.tenancy.keys import Keys

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
keys_app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")
app.add_typer(keys_app, name="keys")
app.add_typer(operate.trainers, name="trainers")
app.add_typer(operate.replicas, name="replicas")
app.command()(operate.maintenance)

Models = Annotated[
    list[str],
    typer.Option("--model", help="NAME=PATH of a base model; repeat it for several."),
]
Data = Annotated[Path | None, typer.Option(help="Folder for everything the server keeps.")]


def main() -> None:
    os.umask(0o077)  # what users send is in the data folder: for the owner of the process alone
    app()


@app.command()
def serve(
    model: Models = [],  # noqa: B006 - typer reads the default, nothing writes it
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.")] = None,
    data: Data = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each worker.")] = None,
    trainer: Annotated[
        str | None, typer.Option(help="What trains: local, fsdp or megatron.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks of fsdp or megatron.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Megatron: TP.")] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(help="Megatron: PP.")] = None,
    expert_parallel: Annotated[int | None, typer.Option(help="Megatron: EP.")] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel", help="Megatron: SP.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Have Ray host the ranks: auto, local or HOST:PORT.")
    ] = None,
    trainer_groups: Annotated[
        int | None, typer.Option(help="Trainer groups of each base model.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="What samples: embedded or vllm.")] = None,
    replicas: Annotated[int | None, typer.Option(help="vLLM servers of each base model.")] = None,
    engine_url: Annotated[
        list[str], typer.Option(help="A vLLM that runs already; repeat it for several.")
    ] = [],  # noqa: B006
) -> None:
    """Serve base models to Tinker clients until Ctrl-C."""
    settings = _settings(
        model,
        host=host,
        port=port,
        data=data,
        dtype=dtype,
        threads=threads,
        trainer=trainer,
        trainer_world_size=world_size,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        sequence_parallel=sequence_parallel,
        ray=ray,
        trainer_groups=trainer_groups,
        engine="vllm" if engine_url and engine is None else engine,
        engine_replicas=replicas,
        engine_urls=tuple(engine_url) or None,
    )
    if not settings.models:
        raise typer.BadParameter(
            "no base model: pass --model NAME=PATH, or set models in hearth.toml"
        )
    with contextlib.suppress(KeyboardInterrupt):
        raise typer.Exit(serving.serve(settings))


@app.command()
def doctor(
    model: Models = [],  # noqa: B006
    data: Data = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Instead, what a base model takes: its name, folder or config.json."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="--plan: how many; by default those found, or 1.")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, help="--plan: GiB of each; by default as found, or an H200's 139."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="--plan: runs in memory at once.")] = 8,
    rank: Annotated[int, typer.Option(min=1, max=512, help="--plan: of their adapters.")] = 32,
    train: Annotated[
        str, typer.Option(help="--plan: which layers they train.")
    ] = "attn,mlp,unembed",
    dtype: Annotated[str, typer.Option(help="--plan: of the base, float32 or bfloat16.")] = (
        "bfloat16"
    ),
) -> None:
    """Print versions, devices, settings and where each came from, and what is missing. With
    --plan, what a base model and its adapters take on GPUs, and which sizes to start with."""
    settings = _settings(model, data=data)
    if plan is None:
        print_report(settings, _flags(model, data=data))
        return
    from server.planning.command import plan as run  # nothing that serves needs it

    try:
        run(
            settings,
            plan,
            gpus=gpus,
            gpu_memory=gpu_memory,
            runs=runs,
            rank=rank,
            train=train,
            dtype=dtype,
            console=Console(emoji=False, markup=False),
        )
    except ValueError as error:
        typer.echo(f"hearth: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def simulate(
    tenants: Annotated[int, typer.Option(min=1, help="How many synthetic tenants.")] = 100,
    machine: Annotated[str, typer.Option(help="laptop, h200 or h200-node.")] = "h200",
    minutes: Annotated[float, typer.Option(min=0.01, help="Virtual time.")] = 10.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tenants.")] = 0,
    mix: Annotated[
        str | None, typer.Option(help="Their kinds in proportion, as sft=3,rl=3,flood=1,tail=93.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Of fair share; tenants take them in turn.")] = "1",
    token_budget: Annotated[
        int | None, typer.Option(min=16, help="tick_token_budget, where not the machine's own.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw a PNG (needs matplotlib).")] = None,
) -> None:
    """Run the scheduler with synthetic tenants on a machine that is a formula."""
    from server.simulate.command import simulate as run  # nothing that serves needs it

    try:
        run(
            tenants=tenants,
            machine=machine,
            minutes=minutes,
            seed=seed,
            mix=mix,
            weights=weights,
            token_budget=token_budget,
            plot=plot,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@keys_app.command("create")
def create_key(
    name: str,
    tenant: Annotated[str | None, typer.Option(help="Whose it is; by default its name.")] = None,
    project: Annotated[str, typer.Option(help="Project of what it makes.")] = "default",
    data: Data = None,
) -> None:
    """Make a key and print it; from the first key on, the server at this data folder needs one."""
    key = _with_keys(data, lambda keys: keys.create(name, tenant or name, project))
    typer.echo(key)


@keys_app.command("revoke")
def revoke_key(name: str, data: Data = None) -> None:
    """End every key of that name."""
    count = _with_keys(data, lambda keys: keys.revoke(name))
    typer.echo(f"revoked {count} key{'' if count == 1 else 's'}")
    if not count:
        raise typer.Exit(1)


@keys_app.command("list")
def list_keys(data: Data = None) -> None:
    """List the keys by name; the keys themselves are kept nowhere."""
    table = Table("name", "tenant", "project", "state")
    for name, tenant, project, _, revoked_at in _with_keys(data, lambda keys: keys.all()):
        table.add_row(name, tenant, project, "valid" if revoked_at is None else "revoked")
    Console(emoji=False, markup=False).print(table)


def _settings(model: list[str], **options: Any) -> Settings:
    try:
        return Settings(**_flags(model, **options))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _flags(model: list[str], **options: Any) -> dict[str, Any]:
    """What was given on the command line, as settings."""
    given = {name: value for name, value in options.items() if value is not None}
    if model:
        given["models"] = dict(_named_path(text) for text in model)
    return given


def _named_path(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise typer.BadParameter(f"--model {text!r} is not NAME=PATH")
    folder = Path(path).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(f"--model {name}: {folder} holds no config.json")
    return name, folder


def _with_keys(data: Path | None, work: Callable[[Keys], Awaitable[Any]]) -> Any:
    settings = _settings([], data=data)
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--data {settings.data}: {error.strerror}") from error

    async def run() -> Any:
        db = Database(settings.database_url or sqlite_url(settings.data / "hearth.db"))
        await migrate(db.engine)
        db.start()
        try:
            return await work(Keys(db, time.time))
        finally:
            await db.stop()

    return asyncio.run(run())


if __name__ == "__main__":
    main()
