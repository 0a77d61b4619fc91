// Markdown as nodes of the page. Nothing here makes markup out of text: what a model writes can only become these nodes.
import type { ComponentChildren, JSX } from "preact";
import { useMemo } from "preact/hooks";
import { lexer, type Token, type Tokens } from "marked";
import { Code } from "./code";

const MOST = 200_000; // characters; what is longer is shown as plain text

/** Only links that open a page or a mail; never javascript:, data: or file:. */
function safe(href: string): string | null {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const ENTITIES: Record<string, string> = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };
const plain = (text: string): string => text.replace(/&(?:amp|lt|gt|quot|#39);/g, (found) => ENTITIES[found]);

function inline(tokens: Token[] | undefined): ComponentChildren {
  return (tokens ?? []).map((token, number) => {
    switch (token.type) {
      case "strong": return <strong key={number}>{inline(token.tokens)}</strong>;
      case "em": return <em key={number}>{inline(token.tokens)}</em>;
      case "del": return <del key={number}>{inline(token.tokens)}</del>;
      case "codespan": return <code key={number}>{plain(token.text)}</code>;
      case "br": return <br key={number} />;
      case "link": {
        const href = safe(token.href);
        return href ? <a key={number} href={href} target="_blank" rel="noopener noreferrer nofollow">{inline(token.tokens)}</a> : <span key={number}>{token.raw}</span>;
      }
      case "image": return <span key={number} class="picture">picture: {token.text || token.href}</span>; // nothing is fetched
      case "escape": return token.text;
      case "text": return "tokens" in token && token.tokens ? inline(token.tokens) : plain(token.text);
      default: return plain(token.raw); // HTML, too: it is text here
    }
  });
}

function blocks(tokens: Token[]): ComponentChildren {
  return tokens.map((token, number): ComponentChildren => {
    switch (token.type) {
      case "space": return null;
      case "hr": return <hr key={number} />;
      case "heading": {
        const Tag = `h${Math.min(6, token.depth + 2)}` as "h3";
        return <Tag key={number}>{inline(token.tokens)}</Tag>;
      }
      case "paragraph": return <p key={number}>{inline(token.tokens)}</p>;
      case "text": return <span key={number}>{"tokens" in token && token.tokens ? inline(token.tokens) : plain(token.text)}</span>;
      case "code": return <Code key={number} text={token.text} language={token.lang ?? ""} />;
      case "blockquote": return <blockquote key={number}>{blocks(token.tokens ?? [])}</blockquote>;
      case "list": {
        const list = token as Tokens.List;
        const items = list.items.map((item, at) => (
          <li key={at} class={item.task ? "task" : undefined}>
            {item.task && <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "to do"} />}
            {blocks(item.tokens.filter((one) => one.type !== "checkbox"))}
          </li>
        ));
        return list.ordered ? <ol key={number} start={list.start || 1}>{items}</ol> : <ul key={number}>{items}</ul>;
      }
      case "table": return <Table key={number} table={token as Tokens.Table} />;
      default: return <p key={number}>{token.raw}</p>; // HTML, definitions: as text
    }
  });
}

function Table({ table }: { table: Tokens.Table }): JSX.Element {
  const cell = (one: Tokens.TableCell) => inline(one.tokens);
  return (
    <div class="scrolls" tabIndex={0} role="region" aria-label="table">
      <table>
        <thead><tr>{table.header.map((one, at) => <th key={at} scope="col">{cell(one)}</th>)}</tr></thead>
        <tbody>{table.rows.map((row, at) => <tr key={at}>{row.map((one, column) => <td key={column}>{cell(one)}</td>)}</tr>)}</tbody>
      </table>
    </div>
  );
}

export function Markdown({ text }: { text: string }): JSX.Element {
  const nodes = useMemo(() => {
    if (text.length > MOST) return <pre>{text}</pre>;
    try {
      return blocks(lexer(text, { gfm: true, breaks: true }));
    } catch {
      return <pre>{text}</pre>;
    }
  }, [text]);
  return <div class="markdown">{nodes}</div>;
}
