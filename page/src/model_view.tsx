// The model: what it is, what it takes, how the server was set up, how to connect a program.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { bytes, count, percent } from "./format";
import { connection } from "./live";
import { loadModel, model, type ModelData } from "./model_data";
import { CopyButton } from "./parts";

const PROGRAMS: Record<string, string> = {
  claude: "Claude Code", codex: "Codex", opencode: "opencode", qwen: "Qwen Code", aider: "aider", python: "Python", curl: "curl",
};

export function ModelView(): JSX.Element {
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (connection.value === "live") loadModel().then(() => setProblem(""), (error) => setProblem(error.message));
  }, [connection.value]);
  const data = model.value;
  return (
    <main class="view model" id="main" tabIndex={-1}>
      <header class="top">
        <div class="who"><h1>{data?.name ?? "Model"}</h1><p>{data ? `${data.inspect.name ?? data.inspect.path} · everwarm ${data.version}` : ""}</p></div>
      </header>
      <div class="scroll" tabIndex={0} role="region" aria-label="Model">
        {problem && <p class="problem">{problem}</p>}
        {data && <><Facts data={data} /><Connect data={data} />{data.machine && <MemoryMap data={data} />}{data.machine && <Settings data={data} />}<Metadata data={data} /></>}
      </div>
    </main>
  );
}

function Facts({ data }: { data: ModelData }): JSX.Element {
  const { inspect } = data;
  const use = inspect.use;
  const types = Object.entries(inspect.tensor_types).map(([kind, n]) => `${n} × ${kind}`).join(", ");
  const facts: [string, string][] = [
    ["Architecture", inspect.architecture],
    ["Parameters", count(inspect.parameters)],
    ["Context", `${count(data.context)} tokens`],
    ["File", `${bytes(inspect.size_bytes)}, ${count(inspect.tensor_count)} tensors`],
    ["Tensor types", types],
    ["Keys and values", use.kv_bytes_per_token?.[data.kv_type] ? `${bytes(use.kv_bytes_per_token[data.kv_type])} per token (${data.kv_type})` : data.kv_type],
    ["Chat", use.chat ?? "no chat template"],
    ["Tool calls", use.tool_format ? `as ${use.tool_format}` : "none"],
    ["Reasoning", use.reasoning ? `in ${use.reasoning}` : "none"],
    ["Exact", data.exact ? "answers are bit for bit those without a cache" : "answers may differ in the last bits"],
  ];
  if (use.memory) facts.push(["Memory for a full context", bytes(use.memory[data.kv_type] ?? 0)]);
  return <section class="block"><h2>What it is</h2><dl class="facts">{facts.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl></section>;
}

function Connect({ data }: { data: ModelData }): JSX.Element {
  const [chosen, setChosen] = useState(data.connect[0].name);
  const one = data.connect.find((other) => other.name === chosen)!;
  return (
    <section class="block">
      <h2>Connect a client</h2>
      <p class="quiet">Agent programs work with this server. Run the command in a shell; the program must be installed.</p>
      <div class="tabs" role="group" aria-label="Programs">{data.connect.map(({ name }) => <button key={name} type="button" aria-pressed={name === chosen} onClick={() => setChosen(name)}>{PROGRAMS[name] ?? name}</button>)}</div>
      <figure class="code command"><figcaption><span>{PROGRAMS[one.name] ?? one.name}</span><CopyButton text={one.command} what="command" /></figcaption><pre tabIndex={0} aria-label="command"><code>{one.command}</code></pre></figure>
    </section>
  );
}

interface Part {
  label: string;
  value: number;
  colour: string;
}

function Stack({ title, whole, parts }: { title: string; whole: number; parts: Part[] }): JSX.Element {
  const words = parts.map((part) => `${part.label} ${bytes(part.value)}`).join(", ");
  return (
    <div class="stack">
      <h3>{title}<span>{bytes(whole)}</span></h3>
      <div class="stack-bar" role="img" aria-label={`${title}: ${words}`}>{parts.map((part) => <span key={part.label} class={part.colour} style={{ width: `${Math.max(0.4, (100 * part.value) / whole)}%` }} title={`${part.label}: ${bytes(part.value)}`} />)}</div>
      <ul class="keys">{parts.map((part) => <li key={part.label}><i class={part.colour} aria-hidden="true" />{part.label}<b>{bytes(part.value)}</b></li>)}</ul>
    </div>
  );
}

function MemoryMap({ data }: { data: ModelData }): JSX.Element {
  const { memory, disk, kernels } = data.machine!;
  const known = memory.weight_bytes + memory.hot_bytes;
  const program = Math.max(0, memory.process_bytes - known);
  const elsewhere = Math.max(0, memory.total_bytes - memory.available_bytes - Math.max(known, memory.process_bytes));
  return (
    <section class="block">
      <h2>Memory and disk</h2>
      <Stack title="Memory" whole={memory.total_bytes} parts={[
        { label: memory.mapped ? "weights, mapped" : "weights", value: memory.weight_bytes, colour: "of-shared" },
        { label: "agents (hot)", value: memory.hot_bytes, colour: "of-hot" },
        { label: "rest of everwarm", value: program, colour: "of-accent" },
        { label: "other programs", value: elsewhere, colour: "of-quiet" },
        { label: "available", value: memory.available_bytes, colour: "of-free" },
      ]} />
      <Stack title="Disk" whole={disk.total_bytes} parts={[
        { label: "agents of this model (warm)", value: disk.warm_bytes, colour: "of-warm" },
        { label: "agents of other models", value: disk.other_bytes, colour: "of-state" },
        { label: "other files", value: Math.max(0, disk.total_bytes - disk.free_bytes - disk.warm_bytes - disk.other_bytes), colour: "of-quiet" },
        { label: "free", value: disk.free_bytes, colour: "of-free" },
      ]} />
      <p class="quiet">
        Weights may take {bytes(memory.weight_budget)}{memory.weight_budget >= memory.model_bytes ? ", which holds all of them" : `, ${percent(memory.weight_budget / memory.model_bytes)} of them`}.
        Agents may take {memory.hot_budget === null ? "any memory" : `${bytes(memory.hot_budget)} of memory`} and {bytes(disk.warm_quota)} of disk.
        {disk.read_only && ` Nothing is saved: ${disk.read_only}.`} Computed by {kernels.backend} kernels with {kernels.isa} on {kernels.processor.trim()} ({kernels.cores} cores).
      </p>
    </section>
  );
}

function Settings({ data }: { data: ModelData }): JSX.Element {
  const [all, setAll] = useState(false);
  const settings = data.machine!.settings;
  const changed = settings.filter((one) => one.source !== "default");
  if (!settings.length) return <section class="block"><h2>Settings</h2><p class="quiet">This server was started by a program, which has not said how.</p></section>;
  const shown = all ? settings : changed;
  return (
    <section class="block">
      <h2>Settings</h2>
      <p class="quiet">{changed.length ? `${changed.length} of ${settings.length} settings are not at their default.` : `All ${settings.length} settings are at their default.`} <button type="button" class="link" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Show only those" : "Show all"}</button></p>
      {shown.length > 0 && (
        <div class="scrolls" tabIndex={0} role="region" aria-label="Settings">
          <table><thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">From</th><th scope="col">What it does</th></tr></thead>
            <tbody>{shown.map((one) => <tr key={one.name}><td><code>{one.name}</code></td><td>{one.value}</td><td>{one.source}</td><td class="quiet">{one.help}</td></tr>)}</tbody></table>
        </div>
      )}
    </section>
  );
}

function shortly(value: any): string {
  if (value && typeof value === "object" && "length" in value && "first" in value) return `${count(value.length)} items: ${value.first.map((one: unknown) => JSON.stringify(one)).join(", ")} …`;
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 400 ? `${text.slice(0, 400)} …` : text;
}

function Metadata({ data }: { data: ModelData }): JSX.Element {
  const entries = Object.entries(data.inspect.metadata);
  return (
    <section class="block">
      <details class="more"><summary>All metadata of the file ({count(entries.length)})</summary>
        <div class="scrolls" tabIndex={0} role="region" aria-label="Metadata"><table class="metadata"><tbody>{entries.map(([key, value]) => <tr key={key}><th scope="row"><code>{key}</code></th><td>{shortly(value)}</td></tr>)}</tbody></table></div>
      </details>
    </section>
  );
}

