// All agents: where their blocks are, and what can be done with each. Thousands of rows, of which only those in sight exist.
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { agentPath, ask, choose, json, save } from "./api";
import { ago, bytes, count, plural, span } from "./format";
import { agents, blocksVersion, readOnly, serverNow, type Agent } from "./live";
import { forget, nextBranch } from "./conversation";
import { Button, Empty, Icon, Menu, prompt, say } from "./parts";
import { go, link, route } from "./router";
import { Legend, Strip, type Blocks } from "./strip";
import { TreeView } from "./tree";

type Order = "used" | "id" | "tokens" | "created";

const ORDERS: [Order, string][] = [["used", "latest used"], ["id", "name"], ["tokens", "most tokens"], ["created", "newest"]];
const BEYOND = 6; // rows that exist before and after those in sight

export function AgentsView(): JSX.Element {
  const [tab, setTab] = useState<"list" | "tree">("list");
  return (
    <main class="view agents" id="main" tabIndex={-1}>
      <header class="top">
        <div class="who"><h1>Agents</h1><p>{plural(agents.value.length, "agent")}, with and without a name</p></div>
        <div class="tools">
          <div class="tabs" role="tablist" aria-label="How agents are shown">
            <button type="button" role="tab" aria-selected={tab === "list"} onClick={() => setTab("list")}>List</button>
            <button type="button" role="tab" aria-selected={tab === "tree"} onClick={() => setTab("tree")}>Shared prefixes</button>
          </div>
          {!readOnly.value && <Button icon="up" label="Import an agent" text onClick={() => void importAgent()} />}
        </div>
      </header>
      {tab === "list" ? <List /> : <TreeView />}
    </main>
  );
}

async function importAgent(): Promise<void> {
  const file = await choose(".everwarm,application/octet-stream");
  if (!file) return;
  const name = await prompt({ title: "Import an agent", text: "It keeps its history and its blocks, if it comes from the same model.", value: file.name.replace(/\.everwarm$/, ""), action: "Import" });
  if (!name) return;
  try {
    await json(`/v1/agents/import?name=${encodeURIComponent(name)}`, { method: "POST", file });
    say(`${name} was imported.`);
  } catch (error) {
    say((error as Error).message, true);
  }
}

function List(): JSX.Element {
  const [wanted, setWanted] = useState(route.value.name);
  const [order, setOrder] = useState<Order>("used");
  const [unnamed, setUnnamed] = useState(false);
  useEffect(() => setWanted(route.value.name), [route.value.name]);
  const all = agents.value;
  const rows = useMemo(() => {
    const text = wanted.trim().toLowerCase();
    const found = all.filter((agent) => (unnamed || !agent.anonymous) && agent.id.toLowerCase().includes(text));
    if (order === "id") found.sort((a, b) => a.id.localeCompare(b.id));
    else if (order !== "used") found.sort((a, b) => b[order] - a[order]);
    return found;
  }, [all, wanted, order, unnamed]);
  if (!all.length) {
    return (
      <Empty icon="agents" title="No agents yet">
        <p>An agent is there as soon as somebody talks as it: in the chat, or through the API with the header <code>X-Agent-Id</code>.</p>
        <p><a class="button main" href={link("chat")}><Icon name="chat" /><span>Open the chat</span></a></p>
      </Empty>
    );
  }
  const without = all.filter((agent) => agent.anonymous).length;
  return (
    <>
      <div class="filters">
        <label class="search"><Icon name="search" /><input type="search" placeholder="Filter by name" aria-label="Filter by name" value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} /></label>
        <label class="pick"><span>Order</span><select value={order} onChange={(event) => setOrder(event.currentTarget.value as Order)}>{ORDERS.map(([value, words]) => <option key={value} value={value}>{words}</option>)}</select></label>
        {without > 0 && <label class="check"><input type="checkbox" checked={unnamed} onChange={(event) => setUnnamed(event.currentTarget.checked)} />show {plural(without, "conversation")} without a name</label>}
        <Legend />
      </div>
      {rows.length ? <Rows rows={rows} /> : <Empty icon="search" title="No agent has a name like that"><p>{without > 0 && !unnamed ? "Conversations without a name are hidden." : "Try fewer letters."}</p></Empty>}
    </>
  );
}

function Rows({ rows }: { rows: Agent[] }): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800, row: 74 });
  useLayoutEffect(() => {
    const element = place.current!;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight, row: element.clientWidth < 640 ? 112 : 74 });
    measure();
    const watcher = new ResizeObserver(measure);
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);
  const first = Math.max(0, Math.floor(view.top / view.row) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / view.row) + BEYOND);
  const shown = rows.slice(first, last);
  const blocks = useBlocks(shown);
  return (
    <div class="rows" ref={place} tabIndex={0} role="list" aria-label={plural(rows.length, "agent")} onScroll={(event) => {
      const top = event.currentTarget.scrollTop;
      if (Math.abs(top - view.top) >= view.row || top === 0) setView({ ...view, top });
    }}>
      <div class="rows-all" style={{ height: `${rows.length * view.row}px` }}>
        {shown.map((agent, number) => <Row key={agent.id} agent={agent} blocks={blocks.get(agent.id)} top={(first + number) * view.row} height={view.row} number={first + number + 1} of={rows.length} />)}
      </div>
    </div>
  );
}

/** Where the blocks of the rows in sight are; asked again when blocks have moved. */
function useBlocks(shown: Agent[]): Map<string, Blocks> {
  const [known, setKnown] = useState(new Map<string, Blocks>());
  const asked = useRef({ names: "", version: -1, timer: 0 });
  const names = shown.map((agent) => agent.id);
  const version = blocksVersion.value;
  const key = JSON.stringify(names);
  useEffect(() => {
    const last = asked.current;
    const missing = names.filter((name) => !known.has(name));
    const wanted = version !== last.version ? names : missing;
    if (!wanted.length || (key === last.names && version === last.version)) return;
    clearTimeout(last.timer);
    last.timer = window.setTimeout(() => {
      last.names = key;
      last.version = version;
      json<{ agents: Record<string, Blocks> }>("/v1/page/blocks", { body: { names: wanted.slice(0, 64) } }).then(
        (said) => setKnown((old) => {
          const next = old.size > 400 ? new Map<string, Blocks>() : new Map(old);
          for (const [name, one] of Object.entries(said.agents)) next.set(name, one);
          return next;
        }),
        () => {},
      );
    }, 120);
  }, [key, version]);
  return known;
}

function Row({ agent, blocks, top, height, number, of }: { agent: Agent; blocks?: Blocks; top: number; height: number; number: number; of: number }): JSX.Element {
  const act = async (what: () => Promise<string>) => {
    try { say(await what()); } catch (error) { say((error as Error).message, true); }
  };
  const path = agentPath(agent.id);
  const items = [
    { label: "Evict from memory", icon: "down", act: () => void act(async () => {
      const said = await json<{ freed_bytes: number }>(`${path}?evict_only=true`, { method: "DELETE" });
      return said.freed_bytes ? `${agent.id}: ${bytes(said.freed_bytes)} of memory are free. Its next turn is warm.` : `${agent.id}: nothing was freed; others use its blocks, too, or it was not in memory.`;
    }) },
    { label: "Warm up", icon: "up", act: () => void act(async () => {
      const said = await json<{ restored_blocks: number; restore_s: number; cached_tokens: number }>(`${path}/warm`, { method: "POST" });
      return said.restored_blocks ? `${agent.id}: ${plural(said.restored_blocks, "block")} read in ${span(said.restore_s)}.` : `${agent.id} was in memory already.`;
    }) },
    { label: agent.pinned ? "Unpin" : "Pin: never evict", icon: "pin", act: () => void act(async () => {
      await json(`${path}/pin`, { body: { pinned: !agent.pinned } });
      return agent.pinned ? `${agent.id} is no longer pinned.` : `${agent.id} is pinned.`;
    }) },
    { label: "Fork", icon: "fork", act: () => void (async () => {
      const name = await prompt({ title: `Fork ${agent.id}`, text: "The fork has the same history and goes its own way.", value: nextBranch(agent.id), action: "Fork" });
      if (name) await act(async () => { await json(`${path}/fork`, { body: { name } }); return `${name} was forked from ${agent.id}.`; });
    })() },
    { label: "Export", icon: "down2", act: () => void act(async () => {
      save(`${agent.id}.everwarm`, await (await ask(`${path}/export`, { method: "POST" })).blob());
      return `${agent.id} was exported.`;
    }) },
    { label: "Delete", icon: "close", danger: true, act: () => void (async () => {
      const sure = await prompt({ title: `Delete ${agent.id}?`, text: "Its history and its blocks are removed, in memory and on disk. This can't be undone.", action: "Delete", danger: true });
      if (sure) await act(async () => { await json(path, { method: "DELETE" }); forget(agent.id); return `${agent.id} was deleted.`; });
    })() },
  ];
  return (
    <div class="row" role="listitem" aria-posinset={number} aria-setsize={of} data-agent={agent.id} style={{ transform: `translateY(${top}px)`, height: `${height}px` }}>
      <div class="row-name">
        <a href={link("chat", agent.id)} class={agent.anonymous ? "unnamed" : ""}>{agent.id}</a>
        <span class="marks">
          {agent.pinned && <span class="mark" title="pinned: never evicted"><Icon name="pin" /> pinned</span>}
          {agent.talking && <span class="mark talks">talking</span>}
          {!agent.saved && <span class="mark bad" title="not on disk yet">unsaved</span>}
        </span>
      </div>
      <Strip blocks={blocks} />
      <div class="row-facts">
        <span class={`tier ${blocks?.tier ?? ""}`}>{blocks?.tier ?? "…"}</span>
        <span>{count(agent.tokens)} tokens</span>
        <span>{blocks ? `${bytes(blocks.hot_bytes)} memory` : ""}</span>
        <span>{blocks ? `${bytes(blocks.warm_bytes)} disk` : ""}</span>
        <span>{ago(agent.used, serverNow.value)}</span>
      </div>
      {readOnly.value ? <Button icon="chat" label="Read" onClick={() => go("chat", agent.id)} /> : <Menu label={`Actions for ${agent.id}`} icon="more" items={items} />}
    </div>
  );
}
