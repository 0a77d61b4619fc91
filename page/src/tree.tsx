// Which histories begin alike: a picture of the tree of shared prefixes. Width is tokens.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { json } from "./api";
import { count, plural } from "./format";
import { blocksVersion } from "./live";
import { Empty } from "./parts";
import { ticks } from "./plot";
import { link } from "./router";
import { Legend } from "./strip";

interface Piece {
  begin: number;
  end: number;
  owners: number;
  blocks: number;
  hot: number;
  warm: number;
  text: string;
  agents: string[];
  children: Piece[];
}

interface Tree {
  roots: Piece[];
  shown: number;
  agents: number;
}

const ROW = 42;
const MOST_ROWS = 150;
const NAME = 190; // room for names at the right

interface Placed {
  piece: Piece;
  row: number;
  parent: Placed | null;
}

/** A row for each end; a fork lies on the row of its first child. */
function place(roots: Piece[]): { placed: Placed[]; rows: number; left: number } {
  const placed: Placed[] = [];
  let row = 0;
  let left = 0;
  const visit = (piece: Piece, parent: Placed | null) => {
    if (row >= MOST_ROWS) { left += 1; return; }
    const one: Placed = { piece, row, parent };
    placed.push(one);
    if (!piece.children.length) row += 1;
    else if (piece.agents.length) { row += 1; piece.children.forEach((child) => visit(child, one)); }
    else piece.children.forEach((child) => visit(child, one));
  };
  roots.forEach((root) => visit(root, null));
  return { placed, rows: row, left };
}

/** Without the name of the role that a chat template writes first. */
const words = (text: string): string => text.replace(/^(system|user|assistant)\s+/, "");

export function TreeView(): JSX.Element {
  const [tree, setTree] = useState<Tree | null>(null);
  const [problem, setProblem] = useState("");
  const version = blocksVersion.value;
  useEffect(() => {
    const timer = setTimeout(() => json<Tree>("/v1/page/tree").then((said) => { setTree(said); setProblem(""); }, (error) => setProblem(error.message)), tree ? 1000 : 0);
    return () => clearTimeout(timer);
  }, [version]);
  if (problem) return <p class="problem">{problem}</p>;
  if (!tree) return <p class="quiet padded">Reading the tree …</p>;
  if (!tree.roots.length) return <Empty icon="fork" title="No histories yet"><p>When two agents begin with the same text, such as a system prompt, that beginning is stored and computed once. Here you see it.</p></Empty>;
  const { placed, rows, left } = place(tree.roots);
  const most = Math.max(...placed.map((one) => one.piece.end));
  const width = 1000;
  const x = (tokens: number) => (tokens / most) * (width - NAME);
  const shared = placed.filter((one) => one.piece.owners > 1).reduce((sum, one) => sum + (one.piece.end - one.piece.begin) * (one.piece.owners - 1), 0);
  return (
    <div class="tree">
      <p class="lead">{shared > 0 ? <><b>{count(shared)} tokens</b> are stored and computed once instead of again for each agent that has them.</> : "No two agents begin with the same text so far. When they do, that beginning is stored once."}</p>
      <Legend />
      <div class="scrolls" tabIndex={0} role="region" aria-label="Picture of the tree">
      <svg class="tree-picture" viewBox={`0 0 ${width} ${rows * ROW + 40}`} role="group" aria-label={`${plural(tree.shown, "agent")} as a tree. ${count(shared)} tokens are shared.`}>
        <g class="axis">
          {ticks(most).map((at) => <g key={at}><line x1={x(at)} x2={x(at)} y1={24} y2={rows * ROW + 24} /><text x={x(at)} y={14} text-anchor={at === 0 ? "start" : "middle"}>{count(at)}{at === 0 ? " tokens" : ""}</text></g>)}
        </g>
        {placed.map(({ piece, row, parent }, number) => {
          const y = row * ROW + 34;
          const from = x(piece.begin);
          const wide = Math.max(3, x(piece.end) - from - 1.5);
          const hot = piece.blocks ? piece.hot / piece.blocks : 0;
          const warm = piece.blocks ? piece.warm / piece.blocks : 0;
          const whole = `${piece.owners > 1 ? `shared by ${piece.owners} agents` : piece.agents[0] ?? ""}: tokens ${count(piece.begin)} to ${count(piece.end)}, ${piece.hot} blocks in memory, ${piece.warm} on disk. Begins with: ${piece.text}`;
          return (
            <g key={number}>
              <title>{whole}</title>
              {parent && row !== parent.row && <path class="branch" d={`M${from - 1} ${parent.row * ROW + 42} V${y + 8}`} />}
              <rect x={from} y={y} width={wide} height={16} rx={3} class="block-missing" />
              <rect x={from} y={y} width={wide * (hot + warm)} height={16} rx={3} class="block-warm" />
              <rect x={from} y={y} width={wide * hot} height={16} rx={3} class="block-hot" />
              {piece.owners > 1 && <rect x={from} y={y + 11} width={wide} height={5} class="block-shared" />}
              {wide > 60 && piece.text && <text class="words" x={from + 1} y={y - 4}>{words(piece.text).slice(0, Math.floor(wide / 5.6))}</text>}
              {piece.agents.length > 0 && (
                <a href={link("chat", piece.agents[0])} aria-label={`Open ${piece.agents[0]}`}><text class="leaf" x={from + wide + 8} y={y + 12}>{piece.agents[0].slice(0, 24)}{piece.agents.length > 1 ? ` and ${piece.agents.length - 1} more` : ""}</text></a>
              )}
            </g>
          );
        })}
      </svg>
      </div>
      {(left > 0 || tree.shown < tree.agents) && <p class="quiet">Drawn from the {count(tree.shown)} agents used last, of {count(tree.agents)}{left > 0 ? "; the rest of the picture is left out" : ""}.</p>}
    </div>
  );
}
