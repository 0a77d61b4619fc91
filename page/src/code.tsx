// A block of code: coloured by tree, not by markup; with its language and a button that copies it.
import type { ComponentChildren, JSX } from "preact";
import { useMemo } from "preact/hooks";
import { createLowlight } from "lowlight";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import jsonLanguage from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { CopyButton } from "./parts";

const colours = createLowlight({ bash, c, cpp, css, diff, go, ini, java, javascript, json: jsonLanguage, python, rust, sql, typescript, xml, yaml });
colours.registerAlias({ bash: ["shell", "sh", "zsh", "console"], ini: ["toml"], xml: ["html", "svg"], python: ["py"], javascript: ["js", "jsx"], typescript: ["ts", "tsx"], yaml: ["yml"] });

const MOST = 20_000; // characters; what is longer has no colours

interface Node {
  type: string;
  value?: string;
  properties?: { className?: string[] };
  children?: Node[];
}

function drawn(nodes: Node[]): ComponentChildren {
  return nodes.map((node, number) =>
    node.type === "text" ? node.value : <span key={number} class={(node.properties?.className ?? []).join(" ")}>{drawn(node.children ?? [])}</span>,
  );
}

export function Code({ text, language }: { text: string; language: string }): JSX.Element {
  const name = language.trim().split(/\s+/)[0].toLowerCase().slice(0, 20);
  const nodes = useMemo(() => {
    if (!name || text.length > MOST || !colours.registered(name)) return text;
    return drawn(colours.highlight(name, text).children as Node[]);
  }, [text, name]);
  return (
    <figure class="code">
      <figcaption><span>{name || "text"}</span><CopyButton text={text} what="code" /></figcaption>
      <pre tabIndex={0} aria-label={name ? `${name} code` : "code"}><code>{nodes}</code></pre>
    </figure>
  );
}
