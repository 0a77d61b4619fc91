// System prompt and sampling of one conversation. An empty field leaves the choice to the server.
import type { JSX } from "preact";
import type { Signal } from "@preact/signals";
import type { Conversation, Settings } from "./conversation";
import { model } from "./model_data";
import { Dialog } from "./parts";

const FIELDS: { name: keyof Settings; label: string; help: string; step: string; min: number; max?: number }[] = [
  { name: "temperature", label: "Temperature", help: "0 always takes the likeliest token", step: "0.1", min: 0, max: 100 },
  { name: "max_tokens", label: "Longest answer", help: "in tokens", step: "1", min: 1 },
  { name: "top_p", label: "Top p", help: "choose among the likeliest tokens that reach this probability", step: "0.05", min: 0, max: 1 },
  { name: "top_k", label: "Top k", help: "choose among this many likeliest tokens; 0 is all", step: "1", min: 0 },
  { name: "min_p", label: "Min p", help: "least probability, relative to the likeliest", step: "0.01", min: 0, max: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", help: "1 is none", step: "0.05", min: 0.05, max: 100 },
  { name: "seed", label: "Seed", help: "same seed, same answer", step: "1", min: 0 },
];

export function ChatSettings({ of, onClose }: { of: Signal<Conversation>; onClose: () => void }): JSX.Element {
  const { settings } = of.value;
  const set = (name: keyof Settings, value: string) => (of.value = { ...of.value, settings: { ...of.value.settings, [name]: value } });
  const defaults = model.value?.sampling ?? {};
  const reasons = Boolean(model.value?.inspect.use.reasoning);
  const talked = of.value.messages.length > 0;
  return (
    <Dialog title="Conversation settings" kind="drawer" onClose={onClose}>
      <label class="field">
        <span>System prompt</span>
        <textarea rows={6} value={settings.system} placeholder="You are a helpful assistant." onInput={(event) => set("system", event.currentTarget.value)} />
        <small>{talked ? "Changing it changes the beginning of the prompt: the next answer has to compute everything behind it again." : "What the model reads before everything else."}</small>
      </label>
      <div class="fields">
        {FIELDS.map((field) => (
          <label class="field" key={field.name}>
            <span>{field.label}</span>
            <input type="number" inputMode="decimal" step={field.step} min={field.min} max={field.max} value={settings[field.name]} placeholder={defaults[field.name] === undefined ? "server's choice" : String(defaults[field.name])} onInput={(event) => set(field.name, event.currentTarget.value)} />
            <small>{field.help}</small>
          </label>
        ))}
      </div>
      {reasons && (
        <label class="field"><span>Reasoning</span>
          <select value={settings.thinking} onChange={(event) => set("thinking", event.currentTarget.value)}>
            <option value="">as the model does by default</option><option value="on">on</option><option value="off">off</option>
          </select>
        </label>
      )}
      <details class="more"><summary>Tools</summary>
        <label class="field">
          <span>Tools as JSON, in OpenAI's form</span>
          <textarea rows={6} spellcheck={false} class="mono" value={settings.tools} placeholder={'[{"type": "function", "function": {"name": "weather", ...}}]'} onInput={(event) => set("tools", event.currentTarget.value)} />
          <small>Calls are shown, never run. You type what a tool would have said.</small>
        </label>
      </details>
    </Dialog>
  );
}
