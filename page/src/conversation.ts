// Conversations: what was said, as the server keeps it with its agents, and what is being said now.
//
// Editing or regenerating never changes what is there: it goes on in a branch, an agent of its own named after the first
// one (`ada`, `ada~2`, `ada~3`). The beginning that both have in common is not computed again.
import { signal, type Signal } from "@preact/signals";
import { agentPath, ApiError, ask, events, json } from "./api";
import { agents } from "./live";

export interface Call {
  id: string;
  name: string;
  arguments: string;
}

export interface Receipt {
  agent: string;
  tier: "hot" | "warm" | "cold";
  cause: string;
  reason: string;
  prompt_tokens: number;
  cached_tokens: number;
  restored_bytes: number;
  restored_blocks: number;
  restore_s: number;
  lookup_s: number;
  computing_s: number | null;
  committed: boolean | null;
  error: string | null;
  exact: boolean;
  tool_format: string | null;
  rules: string[];
  diverged_at_token: number | null;
}

export interface Why {
  summary: string;
  prompt_tokens: number;
  cached_tokens: number;
  compared_with: string | null;
  difference: { character: number; line: number; old: string; new: string; column: number } | null;
  same_tokens: number;
  advice: { rules: string[]; saved_tokens: number; prompt_rules: string } | null;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  text: string;
  reasoning: string;
  calls: Call[];
  raw: Record<string, unknown>; // as it is sent: what came from the server goes back unchanged
  receipt?: Receipt;
  why?: Why;
  reuse?: { prompt: number; cached: number }; // of an answer that was given before the page was opened
  timings?: { prompt_ms: number; predicted_per_second: number; predicted_n: number };
  progress?: { total: number; cache: number; processed: number };
  stopped?: boolean;
  cutOff?: boolean;
  error?: string;
}

export interface Settings {
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  repetition_penalty: string;
  max_tokens: string;
  seed: string;
  thinking: "" | "on" | "off";
  tools: string;
}

export const NO_SETTINGS: Settings = {
  system: "", temperature: "", top_p: "", top_k: "", min_p: "", repetition_penalty: "", max_tokens: "", seed: "", thinking: "", tools: "",
};

export interface Conversation {
  name: string;
  messages: Message[]; // without the system message, which is in the settings
  settings: Settings;
  rawSystem: Record<string, unknown> | null;
  state: "loading" | "ready" | "writing" | "failed";
  problem: string;
  abort: AbortController | null;
}

const open = new Map<string, Signal<Conversation>>();

export function isOpen(name: string): boolean {
  return open.has(name);
}

const empty = (name: string, settings: Settings = NO_SETTINGS): Conversation => ({
  name, messages: [], settings: { ...settings }, rawSystem: null, state: "ready", problem: "", abort: null,
});

/** Whether the server has such an agent. If it has very many, not all of them are told. */
const isKnown = (name: string): boolean => agents.value.length >= 5000 || agents.value.some((agent) => agent.id === name);

/** The conversation of an agent, read from the server if it is not open yet. */
export function conversation(name: string): Signal<Conversation> {
  let found = open.get(name);
  if (!found) {
    found = signal(empty(name));
    open.set(name, found);
    if (isKnown(name)) void load(found);
  }
  return found;
}

/** Read it again: after a restart, or when somebody else has talked as this agent. */
export async function load(of: Signal<Conversation>): Promise<void> {
  if (of.value.state === "writing") return;
  const name = of.value.name;
  of.value = { ...of.value, state: "loading" };
  try {
    const said = await json<{ messages: Record<string, unknown>[] | null }>(agentPath(name));
    const all = (said.messages ?? []).map(fromServer);
    const first = all[0]?.role === "system" ? all.shift()! : null;
    const known = of.value.messages;
    all.forEach((message, number) => {
      const old = known[number];
      if (old && old.role === message.role && old.text === message.text) all[number] = { ...old, raw: message.raw };
    });
    of.value = {
      ...of.value, messages: all, state: "ready", rawSystem: first?.raw ?? null,
      problem: said.messages === null ? "This agent's turns came as plain text or token ids, so there are no messages to show." : "",
      settings: { ...of.value.settings, system: first?.text ?? of.value.settings.system },
    };
    const last = of.value.messages[of.value.messages.length - 1];
    if (last?.role === "assistant" && !last.receipt) void remember(of, last);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) of.value = { ...of.value, state: "ready", problem: "" };
    else of.value = { ...of.value, state: "failed", problem: String((error as Error).message) };
  }
}

/** A conversation that the server does not know yet. */
export function draft(name: string, settings: Settings = NO_SETTINGS, messages: Message[] = []): Signal<Conversation> {
  const made = signal({ ...empty(name, settings), messages });
  open.set(name, made);
  return made;
}

export function forget(name: string): void {
  open.delete(name);
}

function textOf(content: unknown): string {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : "")).join("\n");
}

export function fromServer(raw: Record<string, unknown>): Message {
  const calls = Array.isArray(raw.tool_calls) ? raw.tool_calls : [];
  const role = ["system", "user", "assistant", "tool"].includes(String(raw.role)) ? (raw.role as Message["role"]) : raw.role === "developer" ? "system" : "user";
  return {
    role,
    text: textOf(raw.content),
    reasoning: textOf(raw.reasoning_content),
    calls: calls.map((call: any) => ({
      id: String(call?.id ?? ""),
      name: String(call?.function?.name ?? ""),
      arguments: typeof call?.function?.arguments === "string" ? call.function.arguments : JSON.stringify(call?.function?.arguments ?? {}, null, 2),
    })),
    raw,
  };
}

export const userMessage = (text: string): Message => ({ role: "user", text, reasoning: "", calls: [], raw: { role: "user", content: text } });

function number(text: string): number | undefined {
  const value = Number(text);
  return text.trim() === "" || !Number.isFinite(value) ? undefined : value;
}

function body(of: Conversation): Record<string, unknown> {
  const { settings } = of;
  const unchanged = of.rawSystem && textOf(of.rawSystem.content) === settings.system;
  const system = settings.system.trim() ? [unchanged ? of.rawSystem! : { role: "system", content: settings.system }] : [];
  const asked: Record<string, unknown> = {
    messages: [...system, ...of.messages.filter((message) => !message.error || message.text).map((message) => message.raw)],
    stream: true,
    return_progress: true,
    stream_options: { include_usage: true },
    everwarm: { agent: of.name },
  };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"] as const) {
    const value = number(settings[name]);
    if (value !== undefined) asked[name] = value;
  }
  if (settings.thinking) asked.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.tools.trim()) asked.tools = JSON.parse(settings.tools);
  return asked;
}

/** Have the model answer what has been said so far. */
export async function answer(of: Signal<Conversation>): Promise<void> {
  const abort = new AbortController();
  let asked: Record<string, unknown>;
  try {
    asked = body(of.value);
  } catch {
    of.value = { ...of.value, problem: "The tools in the settings are not valid JSON." };
    return;
  }
  let message: Message = { role: "assistant", text: "", reasoning: "", calls: [], raw: { role: "assistant", content: "" } };
  const before = of.value.messages;
  let shown = 0;
  const show = (soon = false) => {
    // Not for each token: a page is drawn sixty times a second at most, and Markdown takes a while to read.
    if (soon && shown) return;
    const draw = () => { shown = 0; of.value = { ...of.value, messages: [...before, message] }; };
    if (soon) shown = window.setTimeout(draw, Math.min(250, 30 + message.text.length / 200));
    else { clearTimeout(shown); draw(); }
  };
  of.value = { ...of.value, state: "writing", abort, problem: "" };
  show();
  try {
    const response = await ask("/v1/chat/completions", { body: asked, signal: abort.signal });
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new ApiError(String(chunk.error.message), 500);
      if (chunk.prompt_progress) message = { ...message, progress: chunk.prompt_progress };
      const delta = chunk.choices?.[0]?.delta;
      if (delta?.content) message = { ...message, text: message.text + delta.content };
      if (delta?.reasoning_content) message = { ...message, reasoning: message.reasoning + delta.reasoning_content };
      for (const part of delta?.tool_calls ?? []) {
        const calls = [...message.calls];
        const old = calls[part.index] ?? { id: "", name: "", arguments: "" };
        calls[part.index] = { id: part.id ?? old.id, name: old.name + (part.function?.name ?? ""), arguments: old.arguments + (part.function?.arguments ?? "") };
        message = { ...message, calls };
      }
      if (chunk.choices?.[0]?.finish_reason === "length") message = { ...message, cutOff: true };
      if (chunk.everwarm) message = { ...message, receipt: chunk.everwarm };
      if (chunk.timings) message = { ...message, timings: chunk.timings };
      show(true);
    }
  } catch (error) {
    if (abort.signal.aborted) message = { ...message, stopped: true };
    else message = { ...message, error: error instanceof ApiError ? error.message : "The connection to the server was lost." };
  }
  message = { ...message, progress: undefined, raw: rawAnswer(message) };
  clearTimeout(shown);
  of.value = { ...of.value, messages: [...before, message], state: "ready", abort: null };
  if (message.receipt && isMiss(message.receipt)) void explain(of, message);
}

function rawAnswer(message: Message): Record<string, unknown> {
  const raw: Record<string, unknown> = { role: "assistant", content: message.text };
  if (message.reasoning) raw.reasoning_content = message.reasoning;
  if (message.calls.length) raw.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return raw;
}

/** Whether a person would want to know why so little was reused. */
export function isMiss(receipt: Receipt): boolean {
  if (receipt.cause === "diverged") return true;
  return ["new", "shared"].includes(receipt.cause) && receipt.prompt_tokens > 64 && receipt.cached_tokens < receipt.prompt_tokens / 2;
}

async function explain(of: Signal<Conversation>, message: Message): Promise<void> {
  try {
    const why = await json<Why>(`${agentPath(message.receipt!.agent || of.value.name)}/why`);
    if (!why.difference) return;
    of.value = { ...of.value, messages: of.value.messages.map((one) => (one === message ? { ...one, why } : one)) };
  } catch {
    // It only explains.
  }
}

/** What is kept with the agent about its last request, also after a restart and whoever has sent it. */
async function remember(of: Signal<Conversation>, message: Message): Promise<void> {
  try {
    const why = await json<Why>(`${agentPath(of.value.name)}/why`);
    if (!why.prompt_tokens) return;
    const said = { reuse: { prompt: why.prompt_tokens, cached: why.cached_tokens }, why: why.difference && why.cached_tokens < why.prompt_tokens / 2 ? why : undefined };
    of.value = { ...of.value, messages: of.value.messages.map((one) => (one === message ? { ...one, ...said } : one)) };
  } catch {
    // It only explains.
  }
}

export function stop(of: Signal<Conversation>): void {
  of.value.abort?.abort();
}

export function say(of: Signal<Conversation>, text: string): void {
  of.value = { ...of.value, messages: [...of.value.messages, userMessage(text)] };
  void answer(of);
}

/** Give back what a tool has said. */
export function giveResult(of: Signal<Conversation>, call: Call, text: string): void {
  const raw = { role: "tool", tool_call_id: call.id, content: text };
  of.value = { ...of.value, messages: [...of.value.messages, { role: "tool", text, reasoning: "", calls: [], raw }] };
  const last = [...of.value.messages].reverse().find((message) => message.role === "assistant" && message.calls.length);
  const given = new Set(of.value.messages.filter((message) => message.role === "tool").map((message) => message.raw.tool_call_id));
  if (last?.calls.every((one) => given.has(one.id))) void answer(of);
}

// Branches

const BRANCH = /^(.*)~(\d+)$/s;

export const baseOf = (name: string): string => BRANCH.exec(name)?.[1] ?? name;

const numberOf = (name: string): number => Number(BRANCH.exec(name)?.[2] ?? 1);

/** All branches of a conversation that are known, the first one first. */
export function family(name: string): string[] {
  const base = baseOf(name);
  const known = new Set([...agents.value.map((agent) => agent.id), ...open.keys()].filter((one) => baseOf(one) === base));
  return [...known].sort((a, b) => numberOf(a) - numberOf(b));
}

export function nextBranch(name: string): string {
  const last = Math.max(1, ...family(name).map(numberOf));
  return `${baseOf(name)}~${last + 1}`;
}

/** Go on in a branch with other messages. The conversation that it leaves stays as it is. */
export function branch(of: Signal<Conversation>, messages: Message[]): Signal<Conversation> {
  const made = draft(nextBranch(of.value.name), of.value.settings, messages);
  made.value = { ...made.value, rawSystem: of.value.rawSystem };
  void answer(made);
  return made;
}

// Files

interface Exported {
  everwarm_conversation: number;
  agent: string;
  model: string;
  settings: Settings;
  messages: Record<string, unknown>[];
}

export function asFile(of: Conversation, model: string): string {
  const { system, ...settings } = of.settings;
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  const exported = { everwarm_conversation: 1, agent: of.name, model, settings, messages: [...first, ...of.messages.map((message) => message.raw)] };
  return JSON.stringify(exported, null, 2) + "\n";
}

export function asMarkdown(of: Conversation): string {
  const parts = [`# ${of.name}`, ...(of.settings.system.trim() ? [`**System:** ${of.settings.system}`] : [])];
  for (const message of of.messages) {
    parts.push(`## ${{ user: "You", assistant: "Answer", tool: "Tool result", system: "System" }[message.role]}`, message.text);
    for (const call of message.calls) parts.push(`\`\`\`json\n${call.name} ${call.arguments}\n\`\`\``);
  }
  return parts.join("\n\n") + "\n";
}

/** A conversation out of a file: what `asFile` wrote, or any JSON with a list of messages in OpenAI's form. */
export function fromFile(text: string, fallback: string): { name: string; settings: Settings; messages: Message[] } {
  let said: Partial<Exported> | Record<string, unknown>[];
  try {
    said = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON. Choose one that was exported here, or a JSON file with a list of messages.");
  }
  const list = Array.isArray(said) ? said : said?.messages;
  if (!Array.isArray(list) || !list.every((one) => one && typeof one === "object" && typeof one.role === "string")) {
    throw new Error("The file has no list of messages. Each needs a role and a content.");
  }
  const messages = list.map(fromServer);
  const given: any = Array.isArray(said) ? {} : said;
  const settings = { ...NO_SETTINGS };
  for (const name of Object.keys(NO_SETTINGS) as (keyof Settings)[]) {
    if (typeof given.settings?.[name] === "string") (settings as Record<string, string>)[name] = given.settings[name];
  }
  if (messages[0]?.role === "system") settings.system = messages.shift()!.text;
  return { name: typeof given.agent === "string" && given.agent ? given.agent.slice(0, 250) : fallback, settings, messages };
}
