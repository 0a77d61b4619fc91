// Under each answer: what was reused, in words; and for a miss where the prompt began to differ, and what to do.
import type { JSX } from "preact";
import { count, span } from "./format";
import type { Message, Receipt, Why } from "./conversation";

/** The first sentence: tier, tokens, time. */
export function inWords(receipt: Receipt): string {
  const { cached_tokens: cached, prompt_tokens: all } = receipt;
  const tokens = `${count(cached)} of ${count(all)} tokens`;
  const worth = receipt.computing_s && cached > 0 ? `; computing them takes about ${span(receipt.computing_s)}` : "";
  if (receipt.cause === "off") return `cold: the cache was off, all ${count(all)} tokens were computed`;
  if (cached === 0) return `cold: none of ${count(all)} tokens were known, all of them were computed`;
  if (receipt.tier === "warm") return `warm: ${tokens} restored in ${span(receipt.restore_s)}${worth}`;
  if (receipt.tier === "hot") return `hot: ${tokens} were in memory${worth}`;
  return `cold: only ${tokens} were known, the rest was computed`;
}

const ADVICE: Record<string, string> = {
  evicted: "It was let go to make room. A larger memory budget (--kv-budget) or disk quota (--warm-quota) keeps more; pinning an agent keeps it for good.",
  lost: "A file was damaged or is gone, so it was computed again. `everwarm agents verify` looks through the store.",
  incompatible: "It was saved by another model, KV type or version, so it can't be used here.",
  recomputed: "Computing was faster than reading it from disk, so it was computed.",
};

const CAUSES: Record<string, string> = {
  exact: "The whole prompt was known.",
  extended: "The prompt goes on from the agent's history.",
  shared: "The prompt begins like another history, so that beginning was reused.",
  new: "Nothing like this prompt was computed before.",
};

export function ReceiptLine({ message }: { message: Message }): JSX.Element | null {
  const { receipt, timings, reuse } = message;
  if (!receipt && reuse) {
    return (
      <div class="receipt earlier">
        <p><span class="bar" aria-hidden="true"><span style={{ width: `${(100 * reuse.cached) / reuse.prompt}%` }} /></span><span>when this was asked, {count(reuse.cached)} of {count(reuse.prompt)} tokens were reused</span></p>
        {message.why && <WhyPanel why={message.why} />}
      </div>
    );
  }
  if (!receipt) return null;
  const share = receipt.prompt_tokens ? receipt.cached_tokens / receipt.prompt_tokens : 0;
  const speed = timings && timings.predicted_n > 1 ? `${count(timings.predicted_per_second)} tokens/s` : "";
  return (
    <div class="receipt" data-tier={receipt.tier}>
      <details>
        <summary>
          <span class="bar" aria-hidden="true"><span style={{ width: `${100 * share}%` }} /></span>
          <span class="said">{inWords(receipt)}</span>
          {timings && <span class="times">first token {span(timings.prompt_ms / 1000)}{speed && ` · ${speed}`}</span>}
        </summary>
        <dl>
          <div><dt>Why</dt><dd>{CAUSES[receipt.cause] ?? ADVICE[receipt.cause] ?? receipt.reason}</dd></div>
          {receipt.restored_blocks > 0 && <div><dt>Read from disk</dt><dd>{count(receipt.restored_blocks)} blocks, {count(receipt.restored_bytes)} bytes</dd></div>}
          <div><dt>Looked up in</dt><dd>{span(receipt.lookup_s)}</dd></div>
          <div><dt>Saved</dt><dd>{receipt.committed ? "yes, this turn survives a crash" : receipt.error ? `no: ${receipt.error}` : receipt.committed === null ? "being written" : "no"}</dd></div>
          <div><dt>Exact</dt><dd>{receipt.exact ? "the answer is bit for bit the one without a cache" : "this backend computes other bits with a cache"}</dd></div>
        </dl>
      </details>
      {ADVICE[receipt.cause] && <p class="advice">{receipt.reason && <span>{receipt.reason}. </span>}{ADVICE[receipt.cause]}</p>}
      {message.why && <WhyPanel why={message.why} />}
    </div>
  );
}

/** The old and the new text around the place where they differ. */
export function WhyPanel({ why }: { why: Why }): JSX.Element | null {
  const found = why.difference;
  if (!found) return null;
  const own = why.compared_with !== null && why.summary.includes("its own history");
  return (
    <section class="why" aria-label="Why so little was reused">
      <h4>Why so little was reused</h4>
      <p>The prompt differs from {own ? "this agent's history" : <>the most similar history, <b>{why.compared_with}</b>,</>} at character {count(found.character)}, in line {count(found.line)}. What stands behind that point had to be computed.</p>
      <div class="diff">
        <Excerpt label="before" text={found.old} column={found.column} />
        <Excerpt label="now" text={found.new} column={found.column} />
      </div>
      <p class="todo">
        {why.advice
          ? <>What to do: start the server with <code>--prompt-rules {why.advice.prompt_rules}</code>. It would have saved about {count(why.advice.saved_tokens)} tokens.</>
          : why.same_tokens > 0
            ? <>What to do: put what changes behind what stays the same. About {count(why.same_tokens)} tokens behind the difference are equal and could be reused.</>
            : <>What to do: keep the beginning of the prompt as it is, and say what is new at its end. If the change is meant, nothing is wrong: the next turn will be warm again.</>}
      </p>
    </section>
  );
}

function Excerpt({ label, text, column }: { label: string; text: string; column: number }): JSX.Element {
  return (
    <div class={`excerpt ${label}`}>
      <span class="label">{label}</span>
      <code>{text.slice(0, column)}<mark>{text.slice(column) || "(ends here)"}</mark></code>
    </div>
  );
}
