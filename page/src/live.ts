// What the server does now: one stream of events, kept open; when the server goes away, it is waited for.
import { computed, signal } from "@preact/signals";
import { ApiError, ask, events, json, key } from "./api";

export interface Agent {
  id: string;
  tokens: number;
  used: number;
  created: number;
  pinned: boolean;
  talking: boolean;
  anonymous: boolean;
  saved: boolean;
  group: string;
}

export interface Active {
  id: string;
  agent: string;
  route: string;
  since_s: number;
  tier: string;
  cached_tokens: number;
  prompt_tokens: number;
  computed: number;
  written: number;
  ttft_s: number | null;
  tok_s: number | null;
}

export interface Ended {
  at: number;
  agent: string;
  route: string;
  status: number;
  tier: string;
  cause: string;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  ttft_s: number | null;
  total_s: number;
  between_s: number | null;
  slow_s: number | null;
}

export interface Sample {
  at: number;
  running: number;
  waiting: number;
  active: number;
  hot_bytes: number;
  warm_bytes: number;
  other_bytes: number;
  process_bytes: number;
  weight_bytes: number;
  hits: number;
  misses: number;
  steps: number;
  preemptions: number;
  written: number;
  computed: number;
}

export interface Budgets {
  hot_budget: number | null;
  warm_quota: number;
  weight_budget: number;
  model_bytes: number;
  requests_limit: number;
  read_only_store: string;
  quarantined: number;
}

export interface Layer {
  layer: number | null;
  resident_bytes: number;
  bytes: number;
}

export interface Speed {
  at: number;
  written: number; // tokens per second
  computed: number;
}

interface Session {
  model: string;
  tenant: string | null;
  read_only: boolean;
  machine: boolean;
}

export type Connection = "connecting" | "live" | "away" | "loading" | "key";

const HOUR = 3600;

export const connection = signal<Connection>("connecting");
export const doing = signal(""); // what the server says while it is loading
export const refused = signal(""); // why a key was not taken
export const session = signal<Session | null>(null);
export const readOnly = computed(() => session.value?.read_only ?? false);
export const agents = signal<Agent[]>([]);
export const named = computed(() => agents.value.filter((agent) => !agent.anonymous));
export const active = signal<Active[]>([]);
export const ended = signal<Ended[]>([]);
export const samples = signal<Sample[]>([]);
export const speeds = signal<Speed[]>([]);
export const budgets = signal<Budgets | null>(null);
export const layers = signal<Layer[]>([]);
export const blocksVersion = signal(0); // changes when blocks of agents have moved
export const serverNow = signal(Date.now() / 1000);

let agentFields: string[] = [];
let sampleFields: string[] = [];
let byName = new Map<string, Agent>();
let lastCounted: { at: number; written: number; computed: number } | null = null;

function record<T>(fields: string[], row: unknown[]): T {
  return Object.fromEntries(fields.map((field, number) => [field, row[number]])) as T;
}

function sortAgents(): void {
  agents.value = [...byName.values()].sort((a, b) => b.used - a.used);
}

function kept<T extends { at: number }>(items: T[], now: number): T[] {
  let first = 0;
  while (first < items.length && items[first].at < now - HOUR) first += 1;
  return first ? items.slice(first) : items;
}

/** Tokens per second between samples that follow each other; where nobody has looked there is a gap. */
function between(all: Sample[]): Speed[] {
  const found: Speed[] = [];
  for (let at = 1; at < all.length; at += 1) {
    const [before, now] = [all[at - 1], all[at]];
    const over = now.at - before.at;
    if (over > 0 && over < 10) found.push({ at: now.at, written: Math.max(0, now.written - before.written) / over, computed: Math.max(0, now.computed - before.computed) / over });
  }
  return found;
}

function hello(said: any, who: Session): void {
  session.value = who;
  serverNow.value = said.now;
  agentFields = said.agent_fields;
  byName = new Map(said.agents.map((row: unknown[]) => [row[0] as string, record<Agent>(agentFields, row)]));
  sortAgents();
  ended.value = said.ended;
  sampleFields = said.fields ?? [];
  samples.value = (said.samples ?? []).map((row: unknown[]) => record<Sample>(sampleFields, row));
  budgets.value = said.budgets ?? null;
  layers.value = said.layers ?? [];
  lastCounted = null;
  if (samples.value.length) speeds.value = between(samples.value);
  blocksVersion.value += 1;
  connection.value = "live";
}

function tick(said: any): void {
  serverNow.value = said.at;
  if (active.value.length || said.active.length) active.value = said.active;
  if (said.ended) ended.value = kept([...ended.value, ...said.ended], said.at);
  if (said.sample) samples.value = kept([...samples.value, record<Sample>(sampleFields, said.sample)], said.at);
  const [written, computed] = said.counted;
  if (lastCounted && said.at > lastCounted.at) {
    const over = said.at - lastCounted.at;
    const speed = { at: said.at, written: Math.max(0, written - lastCounted.written) / over, computed: Math.max(0, computed - lastCounted.computed) / over };
    speeds.value = kept([...speeds.value, speed], said.at);
  }
  lastCounted = { at: said.at, written, computed };
  if (said.blocks !== lastBlocks) {
    lastBlocks = said.blocks;
    blocksVersion.value += 1;
  }
}
let lastBlocks = -1;

function changed(said: any): void {
  for (const row of said.changed) {
    const agent = record<Agent>(agentFields, row);
    byName.set(agent.id, agent);
  }
  for (const name of said.gone) byName.delete(name);
  sortAgents();
}

const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

let again: (() => void) | null = null;

/** Try a key. The loop that waits for it goes on. */
export function enter(text: string): void {
  key.value = text.trim();
  refused.value = "";
  again?.();
}

/** Forget the key and what it has shown. */
export function leave(): void {
  key.value = "";
  location.reload();
}

/** Keep the stream open for ever. */
export async function watch(): Promise<void> {
  for (;;) {
    try {
      const who = await json<Session>("/v1/page/session");
      const response = await ask("/v1/page/live");
      for await (const event of events(response)) {
        const said = JSON.parse(event.data);
        if (event.name === "hello") hello(said, who);
        else if (event.name === "tick") tick(said);
        else if (event.name === "agents") changed(said);
        else if (event.name === "weights") layers.value = said;
      }
    } catch (error) {
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        if (key.value) refused.value = error.status === 401 ? "The server does not know this key." : error.message;
        connection.value = "key";
        await new Promise<void>((resolve) => (again = resolve));
        again = null;
        continue;
      }
      if (!(error instanceof ApiError)) console.warn(String(error));
    }
    active.value = [];
    await wait();
  }
}

/** Until the server answers again. */
async function wait(): Promise<void> {
  for (let tries = 0; ; tries += 1) {
    try {
      const response = await fetch("/health", { cache: "no-store" });
      const said = await response.json();
      if (response.ok) return;
      connection.value = said.status === "loading" ? "loading" : "away";
      doing.value = said.done ? `${said.doing} (${Math.round(100 * said.done)} %)` : String(said.doing ?? said.status ?? "");
    } catch {
      connection.value = "away";
      doing.value = "";
    }
    await pause(tries < 20 ? 500 : 2000);
  }
}
