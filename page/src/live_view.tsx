// What the server does now, and what it did in the last hour.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { ago, bytes, count, percent, plural, span } from "./format";
import { active, budgets, ended, layers, samples, serverNow, session, speeds, type Active } from "./live";
import { Empty } from "./parts";
import { Plot, type Series } from "./plot";
import { link } from "./router";

const SPANS: [number, string][] = [[300, "5 min"], [900, "15 min"], [3600, "1 hour"]];
const TIERS = ["hot", "warm", "cold"] as const;

export function LiveView(): JSX.Element {
  const [seconds, setSeconds] = useState(300);
  const now = serverNow.value;
  const from = now - seconds;
  const machine = session.value?.machine ?? false;
  const sample = samples.value[samples.value.length - 1];
  const speed = speeds.value[speeds.value.length - 1];
  const recent = ended.value.filter((one) => one.at >= from);
  const prompt = recent.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const cached = recent.reduce((sum, one) => sum + one.cached_tokens, 0);
  return (
    <main class="view live" id="main" tabIndex={-1}>
      <header class="top">
        <div class="who"><h1>Live</h1><p>{machine ? "Everything this server does" : "Your own requests"}</p></div>
        <div class="tools"><div class="tabs" role="group" aria-label="How far back">{SPANS.map(([value, words]) => <button key={value} type="button" aria-pressed={seconds === value} onClick={() => setSeconds(value)}>{words}</button>)}</div></div>
      </header>
      <div class="scroll" tabIndex={0} role="region" aria-label="Live figures">
        <ul class="figures">
          <Figure value={speed ? count(speed.written) : "0"} unit="tokens/s" label="written now" />
          <Figure value={speed ? count(speed.computed) : "0"} unit="tokens/s" label="prompts computed now" />
          <Figure value={prompt ? percent(cached / prompt) : "–"} unit="" label={`of prompt tokens reused, last ${SPANS.find(([value]) => value === seconds)![1]}`} />
          {machine && <Figure value={sample ? count(sample.running) : "0"} unit="" label="sequences in the batch" />}
          {machine && <Figure value={sample ? count(sample.waiting) : "0"} unit="" label="waiting for memory" />}
        </ul>
        <Requests />
        <div class="plots">
          <FirstToken from={from} to={now} />
          <BetweenTokens from={from} to={now} />
          <Speed from={from} to={now} />
          <HitRate from={from} to={now} />
          {machine && <Batch from={from} to={now} />}
          {machine && <Memory from={from} to={now} />}
          {machine && <Disk from={from} to={now} />}
        </div>
        {machine && <Layers />}
        <Past />
      </div>
    </main>
  );
}

function Figure({ value, unit, label }: { value: string; unit: string; label: string }): JSX.Element {
  return <li><b>{value}{unit && <small> {unit}</small>}</b><span>{label}</span></li>;
}

function Requests(): JSX.Element {
  const now = active.value;
  return (
    <section class="block">
      <h2>Requests now</h2>
      {now.length === 0 ? <p class="quiet">Nobody asks for anything.</p> : (
        <ul class="requests">{now.map((one) => <Request key={one.id} one={one} />)}</ul>
      )}
    </section>
  );
}

function Request({ one }: { one: Active }): JSX.Element {
  const reading = one.ttft_s === null;
  const waits = reading && !one.prompt_tokens;
  return (
    <li>
      <span class="name">{one.agent || "without a name"}</span>
      <span class="state">{waits ? "waiting for its turn or for memory" : reading ? `reading the prompt: ${count(one.computed)} of ${count(one.prompt_tokens)} tokens` : `writing: ${plural(one.written, "token")}${one.tok_s ? `, ${count(one.tok_s)} tokens/s` : ""}`}</span>
      {reading ? <progress value={waits ? undefined : one.computed} max={one.prompt_tokens || 1} aria-label="prompt" /> : <span class={`tier ${one.tier}`}>{one.tier}</span>}
      <small>{span(one.since_s)}</small>
    </li>
  );
}

interface Range {
  from: number;
  to: number;
}

function FirstToken({ from, to }: Range): JSX.Element {
  const series: Series[] = useMemo(() => TIERS.map((tier) => ({
    label: tier, colour: `of-${tier}`, kind: "dots", points: ended.value.filter((one) => one.tier === tier && one.ttft_s !== null).map((one): [number, number] => [one.at, one.ttft_s!]),
  })), [ended.value]);
  return <Plot title="Time to first token" unit="by tier of the prompt, logarithmic" series={series} from={from} to={to} show={span} log empty="No answer in this time" />;
}

function BetweenTokens({ from, to }: Range): JSX.Element {
  const series: Series[] = useMemo(() => {
    const known = ended.value.filter((one) => one.between_s !== null);
    return [
      { label: "median", colour: "of-accent", kind: "dots", points: known.map((one): [number, number] => [one.at, one.between_s!]) },
      { label: "95 of 100 are faster", colour: "of-shared", kind: "dots", points: known.map((one): [number, number] => [one.at, one.slow_s!]) },
    ];
  }, [ended.value]);
  return <Plot title="Time between two tokens" unit="of each answer" series={series} from={from} to={to} show={span} empty="No answer in this time" />;
}

function Speed({ from, to }: Range): JSX.Element {
  const series: Series[] = useMemo(() => [
    { label: "answers", colour: "of-accent", kind: "area", points: speeds.value.map((one): [number, number] => [one.at, one.written]) },
    { label: "prompts", colour: "of-shared", kind: "line", points: speeds.value.map((one): [number, number] => [one.at, one.computed]) },
  ], [speeds.value]);
  return <Plot title="Speed" unit="tokens per second" series={series} from={from} to={to} show={count} most={10} empty="Being measured" />;
}

function HitRate({ from, to }: Range): JSX.Element {
  const series: Series[] = useMemo(() => {
    const points: [number, number][] = [];
    const last: [number, number][] = [];
    for (const one of ended.value) {
      if (!one.prompt_tokens) continue;
      last.push([one.prompt_tokens, one.cached_tokens]);
      if (last.length > 20) last.shift();
      points.push([one.at, last.reduce((sum, [, hit]) => sum + hit, 0) / last.reduce((sum, [all]) => sum + all, 0)]);
    }
    return [
      { label: "each request", colour: "of-warm", kind: "dots", points: ended.value.filter((one) => one.prompt_tokens).map((one): [number, number] => [one.at, one.cached_tokens / one.prompt_tokens]) },
      { label: "last 20 requests", colour: "of-accent", kind: "line", points },
    ];
  }, [ended.value]);
  return <Plot title="Hit rate" unit="share of prompt tokens that were reused" series={series} from={from} to={to} show={percent} most={1} empty="No request in this time" />;
}

const over = (pick: (one: (typeof samples.value)[number]) => number): [number, number][] => samples.value.map((one) => [one.at, pick(one)]);

function Batch({ from, to }: Range): JSX.Element {
  const series: Series[] = useMemo(() => [
    { label: "in the batch", colour: "of-accent", kind: "area", points: over((one) => one.running) },
    { label: "waiting for memory", colour: "of-shared", points: over((one) => one.waiting) },
    { label: "requests", colour: "of-quiet", points: over((one) => one.active) },
  ], [samples.value]);
  return <Plot title="Batch and queue" unit="sequences, requests" series={series} from={from} to={to} show={count} most={4} empty="Being measured" />;
}

function Memory({ from, to }: Range): JSX.Element {
  const limits = budgets.value;
  const series: Series[] = useMemo(() => [
    { label: "agents (hot)", colour: "of-hot", kind: "area", points: over((one) => one.hot_bytes) },
    { label: "weights", colour: "of-shared", points: over((one) => one.weight_bytes) },
  ], [samples.value]);
  const hot = limits?.hot_budget ?? 0;
  const near = samples.value.some((one) => one.hot_bytes > hot / 8);
  return <Plot title="Memory" unit={hot ? `agents may take ${bytes(hot)}` : "agents have no limit"} series={series} from={from} to={to} show={bytes} limit={hot && near ? { value: hot, label: `budget ${bytes(hot)}` } : undefined} empty="Being measured" />;
}

function Disk({ from, to }: Range): JSX.Element {
  const quota = budgets.value?.warm_quota ?? 0;
  const series: Series[] = useMemo(() => [
    { label: "agents of this model (warm)", colour: "of-warm", kind: "area", points: over((one) => one.warm_bytes) },
    { label: "of other models", colour: "of-quiet", points: over((one) => one.other_bytes) },
  ], [samples.value]);
  const near = samples.value.some((one) => one.warm_bytes + one.other_bytes > quota / 8);
  return <Plot title="Disk" unit={`agents may take ${bytes(quota)}`} series={series} from={from} to={to} show={bytes} limit={quota && near ? { value: quota, label: `quota ${bytes(quota)}` } : undefined} empty="Being measured" />;
}

function Layers(): JSX.Element | null {
  const all = layers.value;
  if (!all.length) return null;
  const whole = all.reduce((sum, one) => sum + one.bytes, 0);
  const here = all.reduce((sum, one) => sum + one.resident_bytes, 0);
  const sample = samples.value[samples.value.length - 1];
  return (
    <section class="block">
      <h2>Weight cache</h2>
      <p class="quiet">{here >= whole ? `All ${bytes(whole)} of weights are in memory` : `${bytes(here)} of ${bytes(whole)} of weights are in memory; the rest is streamed`}{sample && sample.hits + sample.misses > 0 ? `, ${percent(sample.hits / (sample.hits + sample.misses))} of uses were hits.` : "."}</p>
      <ol class="layers" aria-label="Layers and how much of each is in memory">
        {all.map((one) => {
          const share = one.bytes ? one.resident_bytes / one.bytes : 0;
          const name = one.layer === null ? "embedding and output" : `layer ${one.layer}`;
          return <li key={String(one.layer)} class={one.layer === null ? "other" : ""} title={`${name}: ${bytes(one.resident_bytes)} of ${bytes(one.bytes)} in memory`}><span style={{ height: `${100 * share}%` }} /><span class="hidden">{name}: {percent(share)} in memory</span></li>;
        })}
      </ol>
      <p class="layer-names"><span>embedding, output</span><span>layer 0</span><span>layer {all.length - 2}</span></p>
    </section>
  );
}

function Past(): JSX.Element {
  const latest = ended.value.slice(-30).reverse();
  return (
    <section class="block">
      <h2>Latest requests</h2>
      {!latest.length ? <Empty icon="live" title="No requests in the last hour"><p>Requests of the chat and of the API appear here with what they reused.</p></Empty> : (
        <div class="scrolls" tabIndex={0} role="region" aria-label="Latest requests">
          <table class="past">
            <thead><tr><th scope="col">Agent</th><th scope="col">Tier</th><th scope="col" class="right">Reused</th><th scope="col" class="right">First token</th><th scope="col" class="right">Answer</th><th scope="col" class="right">Took</th><th scope="col" class="right">When</th></tr></thead>
            <tbody>
              {latest.map((one, number) => (
                <tr key={number}>
                  <td class="agent">{one.agent ? <a href={link("chat", one.agent)}>{one.agent}</a> : <span class="quiet">without a name</span>}</td>
                  <td>{one.status >= 400 ? <span class="tier bad">{one.status === 499 ? "stopped" : `error ${one.status}`}</span> : <span class={`tier ${one.tier}`}>{one.tier}</span>}</td>
                  <td class="right">{count(one.cached_tokens)} of {count(one.prompt_tokens)}</td>
                  <td class="right">{one.ttft_s === null ? "–" : span(one.ttft_s)}</td>
                  <td class="right">{count(one.completion_tokens)} tokens</td>
                  <td class="right">{span(one.total_s)}</td>
                  <td class="right">{ago(one.at, serverNow.value)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
