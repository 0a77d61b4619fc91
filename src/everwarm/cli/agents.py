"""`everwarm agents ...`: what is on disk or in object storage, without loading a model.

What files say must not steer the terminal.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from everwarm import config
from everwarm.cli.agents_text import count_of, print_agent, print_agents, print_explanation, print_problems, row_of
from everwarm.cli.console import bytes_bar, err, human_bytes, out, print_json, printable
from everwarm.cli.options import Json, WarmAge, WarmQuota, WarmUrl
from everwarm.errors import ConfigError, StoreError
from everwarm.settings import Settings
from everwarm.sizes import in_bytes

if TYPE_CHECKING:
    from everwarm.kv.disk.directory import DirectoryStore
    from everwarm.kv.manifest import Manifest
    from everwarm.kv.store import AgentStore
    from everwarm.kv.tools.exported import Export, Moved
    from everwarm.kv.tools.inventory import AgentEntry, Inventory, ModelEntry
    from everwarm.kv.warm.blockstore import BlockStore, Lease

CACHE_BYTES = 256 << 20
"""What these commands keep on disk of a store that is elsewhere."""

app = typer.Typer(help="Agents on disk: their histories and the KV of them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The agent.")]
Tenant = Annotated[str, typer.Option(help="Whose agent it is (default: the tenant that the command line uses).")]
Model = Annotated[
    str | None, typer.Option(help="Which model's, where several have an agent of that name: its name, or its id in ls.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


@app.command("ls")
def list_agents(
    everything: Annotated[bool, typer.Option("--all", help="Conversations without a name, too.")] = False,
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    model: Annotated[str | None, typer.Option(help="Only this model's: its name, or the beginning of its id.")] = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """The agents, the latest used first."""
    inventory = _inventory(warm_url)
    found = [(entry, agent) for entry in inventory.chosen(model) for agent in entry.agents]
    found = [(entry, agent) for entry, agent in found if not tenant or agent.manifest.tenant == tenant]
    found.sort(key=lambda pair: -pair[1].manifest.used)
    shown = [row_of(*pair) for pair in found if everything or not pair[1].manifest.anonymous]
    totals = _totals(inventory, [agent for _, agent in found])
    if as_json:
        print_json({"agents": shown, "totals": totals})
        return
    print_agents(shown, totals, hidden=len(found) - len(shown))
    for entry in inventory.models:
        print_problems(inventory.store, entry)


@app.command("show")
def show(name: Name, tenant: Tenant = "", model: Model = None, warm_url: WarmUrl = None, as_json: Json = False) -> None:
    """One agent: its ids, which of its blocks are there, and what was said."""
    from everwarm.kv.tools.inventory import read_manifest

    inventory = _inventory(warm_url)
    entry, agent = inventory.find(name, tenant, model)
    try:
        manifest = read_manifest(inventory.store, agent.blob, with_text=True)
    except OSError as error:
        raise StoreError(f"agent {name!r}: {error.strerror or error}") from None
    row = row_of(entry, agent) | {
        "weights_id": manifest.weights_id,
        "numerics_id": manifest.numerics_id,
        "layout": manifest.layout,
        "lost": list(agent.lost),
        "path": inventory.store.where(agent.blob),
    }
    if as_json:
        print_json(row | {"messages": manifest.messages})
        return
    print_agent(row, manifest.messages)


@app.command("why")
def why(name: Name, tenant: Tenant = "", model: Model = None, warm_url: WarmUrl = None, as_json: Json = False) -> None:
    """Why an agent's last request reused no more: what changed in its prompt, and what would have helped."""
    from everwarm.kv.tools.inventory import read_manifest
    from everwarm.text.why import MOST_OTHERS, explain, may_be_compared

    inventory = _inventory(warm_url)
    entry, agent = inventory.find(name, tenant, model)

    def others() -> Iterator["Manifest"]:
        near = [other for other in entry.agents if may_be_compared(other.manifest, agent.manifest)]
        for other in sorted(near, key=lambda other: -other.manifest.used)[:MOST_OTHERS]:
            with suppress(OSError, StoreError):  # gone or damaged meanwhile
                yield read_manifest(inventory.store, other.blob, with_text=True)

    try:
        manifest = read_manifest(inventory.store, agent.blob, with_text=True)
    except OSError as error:
        raise StoreError(f"agent {name!r}: {error.strerror or error}") from None
    active = config.resolve(Settings).settings.prompt_rules
    explanation = explain(manifest, others(), active)
    if as_json:
        print_json(explanation.as_json(active))
    else:
        print_explanation(explanation, active)


@app.command("evict")
def evict(
    name: Name, tenant: Tenant = "", model: Model = None, warm_url: WarmUrl = None, as_json: Json = False
) -> None:
    """Drop an agent's KV from memory. Only a running server has any there; what is on disk stays."""
    inventory = _inventory(warm_url)
    entry, agent = inventory.find(name, tenant, model)
    inventory.store.lock().release()
    if inventory.store.many_writers:
        raise ConfigError("each server has its own memory: ask one of them (DELETE /v1/agents/NAME?evict_only=true)")
    if as_json:
        print_json({"agent": agent.manifest.name, "model_id": entry.directory, "freed_bytes": 0, "hot": False})
    else:
        err.print("nothing is in memory: no server runs on this store (everwarm agents rm removes from disk)")


@app.command("rm")
def remove(
    names: Annotated[list[str] | None, typer.Argument(help="The agents.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every agent, also those without a name.")] = False,
    tenant: Tenant = "",
    model: Model = None,
    dry_run: DryRun = False,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Remove agents, and the blocks that nobody else owns."""
    if bool(names) == everything:
        raise ConfigError("name the agents to remove, or give --all")
    inventory = _inventory(warm_url)
    if everything:
        models = inventory.chosen(model)
        chosen = [(entry, one) for entry in models for one in entry.agents if tenant in ("", one.manifest.tenant)]
    else:
        chosen = [inventory.find(name, tenant, model) for name in dict.fromkeys(names or ())]
    freed = 0
    by_model: defaultdict[str, list[tuple[ModelEntry, AgentEntry]]] = defaultdict(list)
    for pair in chosen:
        by_model[pair[0].directory].append(pair)
    for pairs in by_model.values() if not dry_run else ():
        with _opened(inventory, pairs[0][0]) as store:
            before = store.stats().warm_bytes
            for _, agent in pairs:
                store.delete(agent.manifest.name, agent.manifest.tenant)
            freed += before - store.stats().warm_bytes
    if as_json:
        print_json({"removed": [row_of(*pair) for pair in chosen], "freed_bytes": freed, "dry_run": dry_run})
        return
    for entry, agent in chosen:
        word = "would remove" if dry_run else "removed"
        err.print(Text(printable(f"{word} {agent.manifest.name} of {entry.name} ({human_bytes(agent.own_bytes)})")))
    if not dry_run:
        err.print(f"{human_bytes(freed)} freed")


@app.command("fork")
def fork(
    name: Name,
    new: Annotated[str, typer.Argument(help="Name of the copy.")],
    tenant: Tenant = "",
    model: Model = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Another agent with the same history. Costs one manifest; blocks are shared."""
    inventory = _inventory(warm_url)
    entry, agent = inventory.find(name, tenant, model)
    with _opened(inventory, entry) as store:
        store.fork(name, new, tenant)
    if as_json:
        print_json({"agent": new, "of": name, "model_id": entry.directory, "tokens": len(agent.manifest.tokens)})
    else:
        err.print(Text(printable(f"{new} goes on from {name}: {count_of(len(agent.manifest.tokens), 'token')}")))


@app.command("pin")
def pin(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="Let it go like any other.")] = False,
    tenant: Tenant = "",
    model: Model = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Keep an agent's blocks, whatever the quota and its age."""
    inventory = _inventory(warm_url)
    entry, _ = inventory.find(name, tenant, model)
    with _opened(inventory, entry) as store:
        store.pin(name, not off, tenant)
    if as_json:
        print_json({"agent": name, "model_id": entry.directory, "pinned": not off})
    else:
        err.print(Text(printable(f"{name} {'may go' if off else 'stays'}")))


@app.command("export")
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(help="Where to; must not exist.")],
    tenant: Tenant = "",
    model: Model = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Write an agent to one file, for another machine with the same weights and numerics. It holds what was said."""
    from everwarm.kv.tools.export import export_agent

    inventory = _inventory(warm_url)
    entry, _ = inventory.find(name, tenant, model)
    with _opened(inventory, entry, writing=False) as store, _bar("exporting") as bar:
        moved = export_agent(store, name, file, tenant, bar)
    _tell(moved, as_json, "exported")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    name: Annotated[str | None, typer.Option("--as", help="Another name for the agent.")] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Share its blocks with the tenant's other agents: whoever made the file can then lie to all.",
        ),
    ] = False,
    tenant: Tenant = "",
    warm_quota: WarmQuota = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Take in an agent that was exported, for a model that has run here."""
    from everwarm.kv.tools.exported import Export
    from everwarm.kv.tools.import_ import import_agent

    quota = _quota(warm_quota)
    inventory = _inventory(warm_url)
    with Export(file) as header:
        entry = _model_for(inventory, header)
    with _opened(inventory, entry, quota=quota) as store, _bar("verifying") as bar:
        moved = import_agent(store, file, name, tenant, trust=trust, progress=bar)
    _tell(moved, as_json, "imported")


@app.command("verify")
def verify(
    mend: Annotated[
        bool, typer.Option("--repair", help="Move damaged files to quarantine, write again what is derived.")
    ] = False,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Read every file and compare it with its checksum. Exit code 1 if one is damaged (and was not repaired)."""
    from everwarm.kv.tools import verify as check

    store = _store(warm_url)
    held = _lock(store) if mend else None
    try:
        with _bar("reading") as bar:
            report = check.repair(store, bar) if held else check.verify(store, bar)
    finally:
        if held:
            held.release()
    if as_json:
        print_json(check.as_json(report))
    else:
        for finding in report.damaged:
            out.print(Text(printable(f"DAMAGED  {finding.path}: {finding.what}")))
        for finding in report.repaired:
            out.print(Text(printable(f"repaired {finding.path}: {finding.what}")))
        for finding in report.notes:
            out.print(Text(printable(f"note     {finding.path}: {finding.what}")))
        out.print(
            f"{report.files:,} files, {human_bytes(report.size_bytes)}, {count_of(report.agents, 'agent')}: "
            + (f"{len(report.damaged)} damaged" if report.damaged else "all as it was written")
        )
    if report.damaged and not held:
        raise typer.Exit(1)


@app.command("gc")
def collect(
    dry_run: DryRun = False,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="What is in quarantine, too.")] = False,
    warm_age: WarmAge = None,
    warm_quota: WarmQuota = None,
    warm_url: WarmUrl = None,
    as_json: Json = False,
) -> None:
    """Remove what nobody needs: half-written files, agents not used for long, blocks of no agent; and what is over
    the quota.
    """
    from everwarm.kv.tools import gc

    store, quota, age = _store(warm_url), _quota(warm_quota), _age_s(warm_age)
    if store.many_writers:
        _collect(store, time.time() - age, quarantine, dry_run, as_json)
        return
    held = None if dry_run else _lock(store)
    try:
        plan = gc.plan(store, before=time.time() - age, quota=quota, quarantine=quarantine)
        freed = gc.carry_out(store, plan) if held else 0
    finally:
        if held:
            held.release()
    if as_json:
        print_json(gc.as_json(plan) | {"freed_bytes": freed, "dry_run": dry_run})
        return
    for removal in plan.removals:
        word = "would remove" if dry_run else "removed"
        out.print(Text(printable(f"{word} {removal.path} ({human_bytes(removal.size_bytes)}): {removal.why}")))
    for note in plan.notes:
        err.print(Text(printable(note)))
    if plan.excess:
        err.print(f"{human_bytes(plan.excess)} over the quota can't go: pinned agents, histories (everwarm agents rm)")
    size = plan.size_bytes if dry_run else freed
    err.print(f"{count_of(len(plan.removals), 'file')}, {human_bytes(size)}{' could go' if dry_run else ' freed'}")


# What commands share --------------------------------------------------------------------------------------------------


def _store(warm_url: str | None = None) -> "BlockStore":
    """Where agents are kept: object storage if a flag or a setting says so, else the directory of this machine."""
    url = config.resolve(Settings, {"warm_url": warm_url}).settings.warm_url
    if not url:
        return _directory()
    from everwarm.kv.remote.opening import open_warm

    return open_warm(url, config.home(), CACHE_BYTES, create=False)


def _directory() -> "DirectoryStore":
    from everwarm.kv.disk.directory import DirectoryStore

    return DirectoryStore(config.home() / "agents")


def _inventory(warm_url: str | None) -> "Inventory":
    from everwarm.kv.tools.inventory import take_inventory

    try:
        return take_inventory(_store(warm_url))
    except OSError as error:
        raise StoreError(f"the agents can't be listed: {error.strerror or error}") from None


def _lock(store: "BlockStore") -> "Lease | None":
    """The right to write, if there is anything to write in."""
    from everwarm.kv.disk.directory import DirectoryStore

    return None if isinstance(store, DirectoryStore) and not store.root.is_dir() else store.lock()


def _collect(store: "BlockStore", before: float, quarantine: bool, dry_run: bool, as_json: bool) -> None:
    """`gc` where several processes write."""
    from everwarm.kv.remote.cached import CachedStore
    from everwarm.kv.tools import collector

    assert isinstance(store, CachedStore)
    done = collector.collect(store.remote, before=before, quarantine=quarantine, dry_run=dry_run)
    if as_json:
        print_json(collector.as_json(done, dry_run))
        return
    for removal in done.removals:
        word = "would remove" if dry_run else "removed"
        out.print(Text(printable(f"{word} {removal.path} ({human_bytes(removal.size_bytes)}): {removal.why}")))
    for note in done.notes:
        err.print(Text(printable(note)))
    size = done.plan.size_bytes if dry_run else done.freed
    err.print(
        f"{count_of(len(done.removals), 'object')}, {human_bytes(size)}{' could go' if dry_run else ' freed'}; "
        f"{count_of(done.marked, 'block')} may go in an hour or later, when gc is run again"
    )


@contextmanager
def _opened(
    inventory: "Inventory", entry: "ModelEntry", *, writing: bool = True, quota: int | None = None
) -> Iterator["AgentStore"]:
    from everwarm.kv.tools.inventory import open_agents

    store = open_agents(inventory.store, entry, writing=writing, quota=_room(inventory.store, quota))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    with bytes_bar() as show_bar:
        yield lambda done, total: show_bar(what, done, total)


def _model_for(inventory: "Inventory", export: "Export") -> "ModelEntry":
    """The model whose KV it is. Raises StoreError naming it if it has not run here."""
    for entry in inventory.models:
        if entry.ids is not None and (entry.ids.weights_id, entry.ids.numerics_id, entry.ids.layout.digest) == (
            export.weights_id, export.numerics_id, export.layout,
        ):  # fmt: skip
            return entry
    known = ", ".join(entry.described for entry in inventory.models) or "none"
    raise StoreError(
        f"{export.path}: {export.needs}, which has not run here; known are: {known}. "
        "Say something to that model once (everwarm generate MODEL --prompt Hello), then import again"
    )


def _room(store: "BlockStore", quota: int | None) -> int:
    """What may be stored there."""
    if store.many_writers:
        return store.free_bytes()
    return _quota(None) if quota is None else quota


def _quota(flag: str | None) -> int:
    from everwarm.kv.warm.blockstore import most_bytes

    return in_bytes(
        config.resolve(Settings, {"warm_quota": flag}).settings.warm_quota, lambda: most_bytes(_directory())
    )


def _age_s(flag: str | None) -> float:
    return config.resolve(Settings, {"warm_age": flag}).settings.warm_age_s


def _totals(inventory: "Inventory", found: Sequence["AgentEntry"]) -> dict[str, int]:
    models = inventory.models
    return {
        "agents": len(found),
        "anonymous": sum(agent.manifest.anonymous for agent in found),
        "blocks": sum(len(entry.blocks) for entry in models),
        "unowned_blocks": sum(len(entry.unowned) for entry in models),
        "bytes": inventory.size_bytes,
        "quota_bytes": _quota(None),
        "quarantined": inventory.quarantined,
        "quarantined_bytes": inventory.quarantined_bytes,
        "unreadable": sum(len(entry.unreadable) for entry in models),
        "other_versions": sum(len(entry.other_versions) for entry in models),
    }


def _tell(moved: "Moved", as_json: bool, word: str) -> None:
    if as_json:
        print_json(asdict(moved))
        return
    lost = (
        f"; {count_of(moved.lost_blocks, 'block')} were lost, their tokens are computed again"
        if moved.lost_blocks
        else ""
    )
    err.print(
        Text(
            printable(
                f"{word} {moved.agent} of {moved.model}: {count_of(moved.tokens, 'token')}, "
                f"{count_of(moved.blocks, 'block')}, {human_bytes(moved.size_bytes)}{lost}"
            )
        )
    )
    if word == "exported":
        out.print(moved.path, markup=False)
