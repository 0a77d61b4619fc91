// Talk to an agent.
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Signal } from "@preact/signals";
import { agentPath, choose, json, save } from "./api";
import { ago, count, plural } from "./format";
import { agents, connection, named, readOnly, serverNow, session } from "./live";
import {
  answer, asFile, asMarkdown, branch, conversation, draft, family, fromFile, giveResult, load, nextBranch, say as tell, stop, userMessage,
  type Call, type Conversation, type Message,
} from "./conversation";
import { ChatSettings } from "./chat_settings";
import { Markdown } from "./markdown";
import { Button, CopyButton, Empty, Icon, Menu, prompt, say } from "./parts";
import { ReceiptLine } from "./receipt";
import { go, link, route } from "./router";

const NAMES = ["ada", "bob", "cleo", "dan", "eva", "finn", "gia", "hugo", "ida", "jon", "kim", "leo", "mia", "nils", "olga", "paul"];

/** A name that nobody has. */
export function freshName(): string {
  const known = new Set(agents.value.map((agent) => agent.id));
  const free = NAMES.find((name) => !known.has(name));
  if (free) return free;
  for (let number = 2; ; number += 1) if (!known.has(`agent-${number}`)) return `agent-${number}`;
}

export function newConversation(): void {
  const name = freshName();
  draft(name);
  go("chat", name);
}

export async function importConversation(): Promise<void> {
  const file = await choose(".json,application/json");
  if (!file) return;
  try {
    const found = fromFile(await file.text(), file.name.replace(/\.json$/, "") || "imported");
    const known = new Set(agents.value.map((agent) => agent.id));
    const name = known.has(found.name) ? nextBranch(found.name) : found.name;
    draft(name, found.settings, found.messages);
    go("chat", name);
    say(`Imported ${plural(found.messages.length, "message")}. The agent is kept once you say something.`);
  } catch (error) {
    say((error as Error).message, true);
  }
}

export function ChatView(): JSX.Element {
  const name = route.value.name;
  if (!name) return <Start />;
  return <Talk key={name} name={name} />;
}

function Start(): JSX.Element {
  const latest = named.value.slice(0, 4);
  return (
    <main class="view chat" id="main" tabIndex={-1}>
      <Empty icon="chat" title="Talk to an agent">
        <p>An agent remembers everything that was said. When it comes back, even after a restart, its memory is read and not computed again, and each answer says so.</p>
        {!readOnly.value && <p><Button kind="main" icon="plus" label="New conversation" text onClick={newConversation} /></p>}
        {latest.length > 0 && (
          <ul class="cards">
            {latest.map((agent) => (
              <li key={agent.id}><a class="card" href={link("chat", agent.id)}><b>{agent.id}</b><small>{count(agent.tokens)} tokens · {ago(agent.used, serverNow.value)}</small></a></li>
            ))}
          </ul>
        )}
      </Empty>
    </main>
  );
}

function Talk({ name }: { name: string }): JSX.Element {
  const of = conversation(name);
  const now = of.value;
  const [settings, setSettings] = useState(false);
  const [over, setOver] = useState(false);
  const [files, setFiles] = useState<{ name: string; text: string }[]>([]);
  const agent = agents.value.find((one) => one.id === name);
  const away = useRef(false);
  useEffect(() => {
    // After the server was away, somebody else may have talked as this agent.
    if (connection.value !== "live") away.current = true;
    else if (away.current) { away.current = false; void load(of); }
  }, [connection.value]);

  const known = Boolean(agent);
  useEffect(() => {
    // Somebody else has begun to talk as this agent.
    if (known && of.peek().state === "ready" && !of.peek().messages.length) void load(of);
  }, [known]);

  const take = async (list: FileList | File[]) => {
    for (const file of [...list].slice(0, 10)) {
      if (file.size > 1 << 20) { say(`${file.name}: files of up to 1 MiB can be added, this one is larger.`, true); continue; }
      const text = await file.text();
      if (text.includes("\u0000")) { say(`${file.name} is not a text file.`, true); continue; }
      setFiles((old) => [...old, { name: file.name, text }]);
    }
  };
  const dropped = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer?.files.length && !readOnly.value) void take(event.dataTransfer.files);
  };
  const fork = async () => {
    const made = await prompt({ title: `Fork ${name}`, text: "The fork has the same history and goes its own way. It costs almost nothing: both share their blocks.", value: nextBranch(name), action: "Fork" });
    if (!made) return;
    try {
      await json(`${agentPath(name)}/fork`, { body: { name: made } });
      go("chat", made);
    } catch (error) { say((error as Error).message, true); }
  };
  const model = session.value?.model ?? "";
  return (
    <main class={`view chat${over ? " dropping" : ""}`} id="main" tabIndex={-1} onDragOver={(event) => { event.preventDefault(); setOver(true); }} onDragLeave={(event) => { if (event.target === event.currentTarget) setOver(false); }} onDrop={dropped}>
      <header class="top">
        <div class="who"><h1>{name}</h1><p>{agent ? `${count(agent.tokens)} tokens${agent.pinned ? " · pinned" : ""}` : "not kept yet"}</p></div>
        <div class="tools">
          {!readOnly.value && agent && <Button icon="fork" label="Fork" text onClick={() => void fork()} />}
          {!readOnly.value && <Button icon="settings" label="Settings" text onClick={() => setSettings(true)} />}
          <Menu label="More" icon="more" items={[
            { label: "Export as JSON", icon: "down2", act: () => save(`${name}.json`, new Blob([asFile(of.value, model)], { type: "application/json" })) },
            { label: "Export as Markdown", icon: "down2", act: () => save(`${name}.md`, new Blob([asMarkdown(of.value)], { type: "text/markdown" })) },
            { label: "Import a conversation", icon: "up", act: () => void importConversation(), disabled: readOnly.value },
            { label: "Show its blocks", icon: "agents", act: () => go("agents", name) },
          ]} />
        </div>
      </header>
      <Messages of={of} />
      {readOnly.value
        ? <p class="locked">You are looking only: this page may not send anything.</p>
        : <Composer of={of} files={files} setFiles={setFiles} take={take} />}
      {settings && <ChatSettings of={of} onClose={() => setSettings(false)} />}
      {over && <div class="drop-hint" aria-hidden="true"><Icon name="file" /> Drop text files to add them to your message</div>}
      {now.state === "writing" && <span class="hidden" role="status">The model is answering.</span>}
    </main>
  );
}

function Messages({ of }: { of: Signal<Conversation> }): JSX.Element {
  const now = of.value;
  const place = useRef<HTMLDivElement>(null);
  const stick = useRef(true);
  useLayoutEffect(() => {
    const element = place.current!;
    if (stick.current) element.scrollTop = element.scrollHeight;
  }, [now.messages]);
  const others = useBranches(now);
  return (
    <div class="messages" ref={place} tabIndex={0} role="log" aria-label="Conversation" aria-live="off" onScroll={(event) => {
      const element = event.currentTarget;
      stick.current = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
    }}>
      <div class="column">
        {now.settings.system.trim() && <details class="system"><summary>System prompt</summary><p>{now.settings.system}</p></details>}
        {now.state === "loading" && !now.messages.length && <p class="quiet">Reading the conversation …</p>}
        {now.state === "failed" && <p class="problem">{now.problem} <Button label="Try again" text onClick={() => void load(of)} /></p>}
        {now.state === "ready" && !now.messages.length && !now.problem && (
          <Empty icon="chat" title={`Say something to ${now.name}`}><p>Everything is kept with the agent. Drop text files here to add them.</p></Empty>
        )}
        {now.messages.map((message, number) => (
          <OneMessage key={number} of={of} message={message} number={number} others={others} last={number === now.messages.length - 1} />
        ))}
        {now.state !== "failed" && now.problem && <p class="problem">{now.problem}</p>}
      </div>
    </div>
  );
}

/** The messages of all branches of a conversation, by name. Read once there is more than one. */
function useBranches(now: Conversation): Map<string, Message[]> {
  const [, redraw] = useState(0);
  const names = family(now.name).slice(0, 12);
  const key = names.join("\n");
  useEffect(() => {
    if (names.length < 2) return;
    const stops = names.map((name) => conversation(name).subscribe(() => redraw((old) => old + 1)));
    return () => stops.forEach((end) => end());
  }, [key]);
  if (names.length < 2) return new Map();
  return new Map(names.map((name) => [name, conversation(name).peek().messages]));
}

/** Names of branches that are the same up to this message: one for each way in which they go on. */
function alternatives(others: Map<string, Message[]>, mine: string, messages: Message[], number: number): string[] {
  const found = new Map<string, string>();
  for (const [name, theirs] of others) {
    const message = theirs[number];
    if (!message) continue;
    let same = true;
    for (let at = 0; at < number && same; at += 1) same = theirs[at].text === messages[at].text;
    if (!same) continue;
    const text = message.text;
    if (!found.has(text) || name === mine) found.set(text, name);
  }
  return [...found.values()];
}

function OneMessage({ of, message, number, others, last }: { of: Signal<Conversation>; message: Message; number: number; others: Map<string, Message[]>; last: boolean }): JSX.Element | null {
  const [editing, setEditing] = useState(false);
  const now = of.value;
  const busy = now.state === "writing";
  const ways = others.size ? alternatives(others, now.name, now.messages, number) : [];
  const at = ways.indexOf(now.name);
  const writing = busy && last;
  const before = () => now.messages.slice(0, number);
  const replace = (text: string) => {
    setEditing(false);
    if (text.trim() && text !== message.text) go("chat", branch(of, [...before(), userMessage(text)]).value.name);
  };
  const regenerate = () => {
    if (message.error || message.stopped) {
      of.value = { ...now, messages: before() };
      void answer(of);
    } else go("chat", branch(of, before()).value.name);
  };
  if (message.role === "tool") return <ToolResult message={message} />;
  return (
    <article class={`message ${message.role}`} aria-label={message.role === "user" ? "You" : now.name} aria-busy={writing}>
      {editing
        ? <Edit text={message.text} onDone={replace} onCancel={() => setEditing(false)} />
        : (
          <>
            {message.reasoning && (
              <details class="reasoning" open={writing && !message.text}><summary>{writing && !message.text ? "Reasoning …" : "Reasoning"}</summary><Markdown text={message.reasoning} /></details>
            )}
            <div class="body">
              {message.role === "user" ? <p class="plain">{message.text}</p> : <Markdown text={message.text} />}
              {writing && !message.text && !message.reasoning && <Waiting message={message} />}
            </div>
            {message.calls.map((call, index) => <ToolCall key={index} of={of} call={call} writing={writing} />)}
            {message.stopped && <p class="note">You stopped this answer.</p>}
            {message.cutOff && <p class="note">The answer reached its longest length. Change that in the settings.</p>}
            {message.error && <p class="problem">{message.error}</p>}
          </>
        )}
      {!writing && <ReceiptLine message={message} />}
      {!editing && !writing && (
        <div class="under">
          {ways.length > 1 && at >= 0 && (
            <span class="ways">
              <Button icon="left" label="Previous branch" disabled={at === 0} onClick={() => go("chat", ways[at - 1])} />
              <span aria-label={`branch ${at + 1} of ${ways.length}`}>{at + 1} / {ways.length}</span>
              <Button icon="right" label="Next branch" disabled={at === ways.length - 1} onClick={() => go("chat", ways[at + 1])} />
            </span>
          )}
          <span class="acts">
            <CopyButton text={message.text} what="message" />
            {!readOnly.value && message.role === "user" && <Button icon="edit" label="Edit, and go on in a branch" disabled={busy} onClick={() => setEditing(true)} />}
            {!readOnly.value && message.role === "assistant" && <Button icon="again" label={message.error || message.stopped ? "Try again" : "Regenerate in a branch"} disabled={busy} onClick={regenerate} />}
          </span>
        </div>
      )}
    </article>
  );
}

function Waiting({ message }: { message: Message }): JSX.Element {
  const progress = message.progress;
  if (!progress || progress.total - progress.cache < 200) return <p class="waiting"><span class="dots" aria-label="waiting for the first token"><i /><i /><i /></span></p>;
  return (
    <div class="prefill">
      <p>Reading the prompt: {count(progress.processed)} of {count(progress.total)} tokens{progress.cache > 0 && `, ${count(progress.cache)} of them from the cache`}</p>
      <progress value={progress.processed} max={progress.total} aria-label="prompt" />
    </div>
  );
}

function Edit({ text, onDone, onCancel }: { text: string; onDone: (text: string) => void; onCancel: () => void }): JSX.Element {
  const [value, setValue] = useState(text);
  return (
    <form class="edit" onSubmit={(event) => { event.preventDefault(); onDone(value); }}>
      <textarea aria-label="Edit the message" value={value} autofocus rows={Math.min(12, value.split("\n").length + 1)} onInput={(event) => setValue(event.currentTarget.value)} onKeyDown={(event) => { if (event.key === "Escape") onCancel(); }} />
      <p class="quiet">This makes a branch. What was said before stays as it is.</p>
      <footer><Button label="Cancel" text onClick={onCancel} /><button class="button main" type="submit">Send as a branch</button></footer>
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function ToolCall({ of, call, writing }: { of: Signal<Conversation>; call: Call; writing: boolean }): JSX.Element {
  const [value, setValue] = useState("");
  const done = of.value.messages.some((message) => message.role === "tool" && message.raw.tool_call_id === call.id);
  return (
    <section class="tool" aria-label={`Tool call ${call.name}`}>
      <h4><Icon name="tool" /> calls <code>{call.name}</code></h4>
      <pre tabIndex={0}><code>{pretty(call.arguments)}</code></pre>
      {!done && !writing && !readOnly.value && (
        <form onSubmit={(event) => { event.preventDefault(); giveResult(of, call, value); }}>
          <label class="field"><span>What the tool says</span><textarea rows={2} value={value} onInput={(event) => setValue(event.currentTarget.value)} /></label>
          <button class="button" type="submit">Give the result</button>
        </form>
      )}
    </section>
  );
}

function ToolResult({ message }: { message: Message }): JSX.Element {
  return <details class="tool result"><summary><Icon name="tool" /> Tool result</summary><pre tabIndex={0}><code>{pretty(message.text)}</code></pre></details>;
}

interface ComposerProps {
  of: Signal<Conversation>;
  files: { name: string; text: string }[];
  setFiles: (files: { name: string; text: string }[]) => void;
  take: (files: FileList | File[]) => Promise<void>;
}

function Composer({ of, files, setFiles, take }: ComposerProps): JSX.Element {
  const [text, setText] = useState("");
  const area = useRef<HTMLTextAreaElement>(null);
  const busy = of.value.state === "writing";
  useLayoutEffect(() => {
    const element = area.current!;
    element.style.height = "auto";
    element.style.height = `${Math.min(220, element.scrollHeight)}px`;
  }, [text]);
  const send = () => {
    if (busy || (!text.trim() && !files.length)) return;
    const parts = files.map((file) => `${file.name}:\n\`\`\`\n${file.text.replace(/\n$/, "")}\n\`\`\``);
    tell(of, [...parts, text.trim()].filter(Boolean).join("\n\n"));
    setText("");
    setFiles([]);
  };
  const pick = async () => {
    const file = await choose("text/*,.md,.py,.js,.ts,.json,.csv,.toml,.yaml,.yml,.rs,.go,.c,.h,.cpp,.java,.sh,.log");
    if (file) await take([file]);
  };
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); send(); }}>
      {files.length > 0 && (
        <ul class="files">
          {files.map((file, number) => <li key={number}><Icon name="file" /><span>{file.name}</span><small>{plural(file.text.split("\n").length, "line")}</small><Button icon="close" label={`Remove ${file.name}`} onClick={() => setFiles(files.filter((_, at) => at !== number))} /></li>)}
        </ul>
      )}
      <div class="line">
        <Button icon="file" label="Add a text file" onClick={() => void pick()} />
        <textarea ref={area} id="say" aria-label={`Message to ${of.value.name}`} placeholder={`Message to ${of.value.name}`} rows={1} value={text} onInput={(event) => setText(event.currentTarget.value)} onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
          if (event.key === "Escape" && busy) stop(of);
        }} onPaste={(event) => { if (event.clipboardData?.files.length) { event.preventDefault(); void take(event.clipboardData.files); } }} />
        {busy ? <Button icon="stop" kind="main" label="Stop" onClick={() => stop(of)} /> : <button class="button main bare" type="submit" aria-label="Send" title="Send (Enter)" disabled={!text.trim() && !files.length}><Icon name="send" /></button>}
      </div>
      <p class="hint">Enter sends, Shift + Enter begins a new line</p>
    </form>
  );
}

