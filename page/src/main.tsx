// The page: what is always there, and the view that was chosen.
import type { JSX } from "preact";
import { render } from "preact";
import { useState } from "preact/hooks";
import { AgentsView } from "./agents";
import { ChatView } from "./chat";
import { connection, doing, enter, refused, session, watch } from "./live";
import { LiveView } from "./live_view";
import { ModelView } from "./model_view";
import { loadModel, model } from "./model_data";
import { Icon, Notice, QuestionDialog } from "./parts";
import { Nav, Rail, VIEWS, railOpen } from "./rail";
import { route } from "./router";
import { effect } from "@preact/signals";

function KeyEntry(): JSX.Element {
  const [text, setText] = useState("");
  return (
    <main class="gate" id="main">
      <form onSubmit={(event) => { event.preventDefault(); enter(text); }}>
        <img src="/page/icon.svg" alt="" width="44" height="44" />
        <h1>This server needs a key</h1>
        <p>Ask whoever runs it for one. The key stays in the memory of this page: it is not stored, and it is gone when you close the page.</p>
        <label class="field"><span>API key</span><input type="password" autocomplete="off" autofocus value={text} onInput={(event) => setText(event.currentTarget.value)} aria-invalid={Boolean(refused.value)} aria-describedby="refused" /></label>
        <p id="refused" class="problem" role="alert">{refused.value}</p>
        <button class="button main" type="submit" disabled={!text.trim()}>Open</button>
      </form>
    </main>
  );
}

function Loading(): JSX.Element {
  return (
    <main class="gate" id="main">
      <div>
        <img src="/page/icon.svg" alt="" width="44" height="44" class="pulse" />
        <h1>{connection.value === "loading" ? "The model is being loaded" : "Connecting"}</h1>
        <p role="status">{doing.value || "This takes a moment."}</p>
      </div>
    </main>
  );
}

function Banner(): JSX.Element | null {
  if (connection.value === "live" || connection.value === "connecting") return null;
  return <div class="banner" role="alert"><span class="dots" aria-hidden="true"><i /><i /><i /></span> {connection.value === "loading" ? `The server is back and loads the model${doing.value ? `: ${doing.value}` : ""}` : "The server is away. This page reconnects by itself; agents that were saved come back warm."}</div>;
}

function App(): JSX.Element {
  if (connection.value === "key") return <><KeyEntry /><Notice /></>;
  if (!session.value) return <Loading />;
  const { view } = route.value;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the content</a>
      <div class="phone-bar">
        <button type="button" class="button plain bare" aria-label="Conversations" aria-expanded={railOpen.value} onClick={() => (railOpen.value = !railOpen.value)}><Icon name={railOpen.value ? "close" : "agents"} /></button>
        <b>{view === "chat" && route.value.name ? route.value.name : VIEWS.find((one) => one.view === view)!.label}</b>
        <span class={`dot ${connection.value}`} aria-hidden="true" />
      </div>
      <Rail />
      {railOpen.value && <div class="veil" onClick={() => (railOpen.value = false)} />}
      <div class="stage">
        <Banner />
        {view === "chat" ? <ChatView /> : view === "agents" ? <AgentsView /> : view === "live" ? <LiveView /> : <ModelView />}
      </div>
      <div class="phone-nav"><Nav /></div>
      <Notice />
      <QuestionDialog />
    </>
  );
}

effect(() => {
  if (connection.value === "live" && !model.peek()) loadModel().catch(() => {});
});
effect(() => {
  const { view, name } = route.value;
  document.title = `${view === "chat" && name ? name : VIEWS.find((one) => one.view === view)!.label} · everwarm`;
});
void watch();
render(<App />, document.getElementById("app")!);
document.documentElement.dataset.ready = "yes";
