// An agent as a strip of blocks.
import type { JSX } from "preact";
import { count } from "./format";
import { model } from "./model_data";

export interface Blocks {
  tier: "hot" | "warm" | "cold";
  cached_tokens: number;
  hot_bytes: number;
  warm_bytes: number;
  block_tokens: number;
  runs: [string, number][];
  states: number[];
}

const WORDS: Record<string, string> = {
  hot: "in memory", "hot-shared": "in memory, shared with other agents", warm: "on disk", "warm-shared": "on disk, shared with other agents", missing: "not kept", "missing-shared": "not kept",
};

export function inWords(blocks: Blocks): string {
  const parts = blocks.runs.map(([kind, n]) => `${count(n)} ${WORDS[kind] ?? kind}`);
  const states = blocks.states.length ? `; ${count(blocks.states.length)} states` : "";
  return parts.length ? `Blocks of ${blocks.block_tokens} tokens, in order: ${parts.join(", ")}${states}` : "No blocks";
}

/** Each block has its share of the width; with many, neighbours of one kind flow together. */
export function Strip({ blocks }: { blocks: Blocks | undefined }): JSX.Element {
  if (!blocks) return <div class="strip unknown" />;
  const all = blocks.runs.reduce((sum, [, n]) => sum + n, 0);
  if (!all) return <div class="strip none" role="img" aria-label="No blocks" />;
  let at = 0;
  const cells = all <= 64;
  return (
    <div class="strip" role="img" aria-label={inWords(blocks)} title={inWords(blocks)}>
      <svg viewBox={`0 0 ${all} 10`} preserveAspectRatio="none" aria-hidden="true">
        {blocks.runs.map(([kind, n], number) => {
          const [tier, shared] = kind.split("-");
          const x = at;
          at += n;
          return (
            <g key={number}>
              <rect x={x} y={0} width={n} height={10} class={`block-${tier}`} />
              {shared && <rect x={x} y={6.6} width={n} height={3.4} class="block-shared" />}
            </g>
          );
        })}
        {cells && Array.from({ length: all - 1 }, (_, number) => <rect key={`gap${number}`} x={number + 1 - all / 900} y={0} width={all / 450} height={10} class="block-gap" />)}
        {blocks.states.map((position) => <rect key={`state${position}`} x={Math.max(0, position / blocks.block_tokens - all / 200)} y={0} width={Math.max(all / 120, 0.12)} height={10} class="block-state" />)}
      </svg>
    </div>
  );
}

export function Legend(): JSX.Element {
  const states = (model.value?.inspect.use.state_bytes ?? 0) > 0;
  const known: [string, string][] = [["hot", "hot: in memory"], ["warm", "warm: on disk"], ["shared", "shared"], ["missing", "cold: not kept"]];
  if (states) known.push(["state", "state of recurrent layers"]);
  return <ul class="legend" aria-label="Colours">{known.map(([kind, words]) => <li key={kind}><i class={`block-${kind}`} aria-hidden="true" />{words}</li>)}</ul>;
}
