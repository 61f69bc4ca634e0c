"""`hearth doctor`: what is here, what was set and where, what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource
from rich.console import Console
from rich.table import Column, Table
from sqlalchemy import make_url

from server import operate
from server.live import LiveServer
from server.settings import TOML_FILE, Settings

FEATURES = {
    "embedded training and sampling": ("torch", "transformers", "peft", "safetensors"),
    "the quickstart and the examples": ("tinker", "matplotlib", "gguf"),
    "PostgreSQL": ("psycopg",),
    "Ray workers": ("ray",),
}
VERSIONS = ("hearth", "fastapi", "sqlalchemy", "torch", "transformers", "peft", "tinker")


def print_report(settings: Settings, flags: Mapping[str, Any]) -> None:
    # Names of runs and addresses are text: `:train:` is no picture, `[::1]` no style.
    console = Console(emoji=False, markup=False)
    console.print(_versions())
    console.print(_machine(settings))
    console.print(_settings(settings, flags))
    console.print(_features(settings))
    live = LiveServer.find(settings.data)
    if rows := live and live.get("trainers"):
        console.print(operate.trainer_table(rows))
    for name, memory in ((live and live.get("memory")) or {}).items():
        console.print(_memory(name, memory))
    if workers := live and live.get("samplers"):
        console.print(_samplers(workers))
    if rows := live and live.get("replicas"):
        console.print(operate.replica_table(rows))
    if ((live and live.get("maintenance")) or {}).get("on"):
        console.print("The server is in maintenance: `hearth maintenance off` ends it.")


def sources(settings: Settings, flags: Mapping[str, Any]) -> dict[str, str]:
    """For each setting, where its value came from: the first of flag, environment, file."""
    environment = EnvSettingsSource(Settings)()
    file = TomlConfigSettingsSource(Settings)()
    found = {}
    for name in type(settings).model_fields:
        if name in flags:
            found[name] = "command line"
        elif name in environment:
            found[name] = f"HEARTH_{name.upper()}"
        elif name in file:
            found[name] = TOML_FILE
        else:
            found[name] = "default"
    return found


def shown(name: str, value: object) -> str:
    """A setting as text, for a report that people paste where others read it."""
    if name == "database_url" and value is not None:
        return make_url(str(value)).render_as_string(hide_password=True)
    return str(value)


def _versions() -> Table:
    table = Table("package", "version", title="Versions")
    table.add_row("python", platform.python_version())
    for name in VERSIONS:
        table.add_row(name, _version(name) or "not installed")
    return table


def _machine(settings: Settings) -> Table:
    table = Table("device", "size", title="Machine")
    table.add_row("CPU", f"{os.cpu_count()} cores, {platform.machine()}")
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    table.add_row("memory", f"{pages * page / 2**30:.1f} GiB")
    data = settings.data.absolute()
    folder = next(place for place in (data, *data.parents) if place.exists())
    table.add_row("disk, free", f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB at {folder}")
    table.add_row("GPU", "NVIDIA driver found" if shutil.which("nvidia-smi") else "none found")
    return table


def _settings(settings: Settings, flags: Mapping[str, Any]) -> Table:
    table = Table("setting", "value", "from", title="Settings")
    for name, source in sources(settings, flags).items():
        table.add_row(name, shown(name, getattr(settings, name)), source)
    return table


def _features(settings: Settings) -> Table:
    table = Table("feature", "missing", title="Features")
    for feature, packages in FEATURES.items():
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        table.add_row(feature, ", ".join(missing) or "nothing")
    for feature, python, package in (
        ("vLLM engines", settings.engine_python, "vllm"),
        ("Megatron trainers", settings.trainer_python, "megatron"),
    ):
        has_it = any(python.parent.parent.glob(f"lib/python*/site-packages/{package}"))
        table.add_row(feature, "nothing" if has_it else f"{package} (make install-{package})")
    return table


def _samplers(workers: Sequence[Mapping[str, Any]]) -> Table:
    """The workers that sample beside trainers which do not."""
    table = Table("base model", "state", "restarts", title="Sampling workers")
    for worker in workers:
        state = "ready" if worker["alive"] else "lost"
        table.add_row(worker["model"], state, str(max(worker["generation"] - 1, 0)))
    return table


def _memory(trainer: str, memory: Mapping[str, Any]) -> Table:
    """What the runs of one trainer group take in the server that runs on this data folder."""
    run_id = Column("run", overflow="fold")  # one that is cut is of no use
    columns = ("weights", "moments", "gradient", "together", "in")
    table = Table(run_id, *columns, title=f"Memory: {trainer}")
    table.add_row("(base model)", "", "", "", _mebibytes(memory["base_model"]), "")
    for run, use in sorted(memory["runs"].items()):
        parts = [use["weights"], use["moments"], use["gradient"]]
        place = "device" if use["on_device"] else "host"
        table.add_row(run, *map(_mebibytes, [*parts, sum(parts)]), place)
    return table


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
