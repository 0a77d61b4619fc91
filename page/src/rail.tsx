// The left side: where one can go, the conversations, and how the server is.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import { json, key } from "./api";
import { ago, count } from "./format";
import { connection, leave, named, readOnly, serverNow, session } from "./live";
import { importConversation, newConversation } from "./chat";
import { baseOf } from "./conversation";
import { Button, Icon } from "./parts";
import { link, route, type View } from "./router";

const MOST = 60;

export const VIEWS: { view: View; label: string }[] = [
  { view: "chat", label: "Chat" }, { view: "agents", label: "Agents" }, { view: "live", label: "Live" }, { view: "model", label: "Model" },
];

export const railOpen = signal(false);

interface Hit {
  agent: string;
  message: number;
  role: string;
  before: string;
  text: string;
  after: string;
}

type Theme = "" | "light" | "dark";
const theme = signal<Theme>("");

function toggleTheme(): void {
  const dark = theme.value ? theme.value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme.value = dark ? "light" : "dark";
  document.documentElement.dataset.theme = theme.value;
}

export function Nav(): JSX.Element {
  return (
    <nav class="views" aria-label="Views">
      {VIEWS.map(({ view, label }) => (
        <a key={view} href={link(view)} aria-current={route.value.view === view ? "page" : undefined} onClick={() => (railOpen.value = false)}>
          <Icon name={view} /><span>{label}</span>
        </a>
      ))}
    </nav>
  );
}

export function Rail(): JSX.Element {
  return (
    <div class={`rail${railOpen.value ? " open" : ""}`}>
      <a class="brand" href="#/chat"><img src="/page/icon.svg" alt="" width="26" height="26" /><span>everwarm</span></a>
      <Nav />
      <Conversations />
      <Foot />
    </div>
  );
}

function Conversations(): JSX.Element {
  const [text, setText] = useState("");
  const [hits, setHits] = useState<{ found: Hit[]; looked: number; agents: number } | null>(null);
  useEffect(() => {
    setHits(null);
    if (text.trim().length < 2) return;
    const timer = setTimeout(() => {
      json<{ found: Hit[]; looked: number; agents: number }>(`/v1/page/search?q=${encodeURIComponent(text.trim())}`).then(setHits, () => setHits(null));
    }, 250);
    return () => clearTimeout(timer);
  }, [text]);
  const wanted = text.trim().toLowerCase();
  const listed = named.value.filter((agent) => agent.id.toLowerCase().includes(wanted));
  return (
    <section class="conversations" aria-label="Conversations">
      <header>
        <h2>Conversations</h2>
        {!readOnly.value && <Button icon="up" label="Import a conversation" onClick={() => void importConversation()} />}
        {!readOnly.value && <Button icon="plus" label="New conversation" onClick={() => { railOpen.value = false; newConversation(); }} />}
      </header>
      <label class="search"><Icon name="search" /><input type="search" placeholder="Search" aria-label="Search names and messages" value={text} onInput={(event) => setText(event.currentTarget.value)} /></label>
      <ul class="list">
        {listed.slice(0, MOST).map((agent) => {
          const branchOf = baseOf(agent.id);
          return (
            <li key={agent.id}>
              <a href={link("chat", agent.id)} aria-current={route.value.view === "chat" && route.value.name === agent.id ? "page" : undefined} onClick={() => (railOpen.value = false)}>
                <span class="name">{branchOf !== agent.id ? <>{branchOf}<em>{agent.id.slice(branchOf.length)}</em></> : agent.id}</span>
                <small>{agent.talking ? <span class="talks">talking</span> : ago(agent.used, serverNow.value)}</small>
              </a>
            </li>
          );
        })}
      </ul>
      {listed.length > MOST && <p class="quiet"><a href={link("agents")}>{count(listed.length - MOST)} more in Agents</a></p>}
      {!listed.length && !wanted && <p class="quiet">No conversation yet. Programs that use the API with an agent's name appear here, too.</p>}
      {!listed.length && wanted && !hits?.found.length && <p class="quiet">No name like that.</p>}
      {hits && hits.found.length > 0 && (
        <>
          <h3>In messages</h3>
          <ul class="list hits">
            {hits.found.map((hit) => (
              <li key={hit.agent}><a href={link("chat", hit.agent)} onClick={() => (railOpen.value = false)}><span class="name">{hit.agent}</span><small>… {hit.before}<mark>{hit.text}</mark>{hit.after} …</small></a></li>
            ))}
          </ul>
        </>
      )}
      {hits && hits.looked < hits.agents && <p class="quiet">Looked through the {count(hits.looked)} latest of {count(hits.agents)} conversations.</p>}
    </section>
  );
}

const STATES: Record<string, string> = { live: "connected", connecting: "connecting", away: "reconnecting", loading: "loading the model", key: "needs a key" };

function Foot(): JSX.Element {
  const who = session.value;
  return (
    <footer class="foot">
      <span class={`dot ${connection.value}`} aria-hidden="true" />
      <span class="server"><b>{who?.model ?? "everwarm"}</b><small role="status">{STATES[connection.value]}{who?.tenant ? ` · ${who.tenant}` : ""}{readOnly.value ? " · looking only" : ""}</small></span>
      {key.value && <Button icon="close" label="Forget the key" onClick={leave} />}
      <Button icon={theme.value === "dark" ? "sun" : "moon"} label="Switch between light and dark" onClick={toggleTheme} />
    </footer>
  );
}
