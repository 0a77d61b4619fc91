// Builds the page into the Python package. `--check` builds it in memory and says whether the committed files are the same.
import { readFileSync, writeFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "src", "everwarm", "server", "page", "files");

const built = await esbuild.build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  outdir: out,
  write: false,
});
const style = await esbuild.build({
  absWorkingDir: here, entryPoints: { app: "src/app.css" }, bundle: true, minify: true, charset: "utf8", outdir: out, write: false,
});

const files = new Map();
for (const file of [...built.outputFiles, ...style.outputFiles]) files.set(file.path.slice(out.length + 1), Buffer.from(file.contents));
for (const name of ["index.html", "icon.svg", "licences.txt"]) files.set(name, readFileSync(join(here, "src", name)));

let packed = 0;
let differs = [];
mkdirSync(out, { recursive: true });
for (const [name, data] of files) {
  packed += gzipSync(data, { level: 9 }).length;
  const path = join(out, name);
  if (process.argv.includes("--check")) {
    let now = null;
    try { now = readFileSync(path); } catch { /* it is not there */ }
    if (now === null || !now.equals(data)) differs.push(name);
  } else {
    writeFileSync(path, data);
  }
}
console.log(`${files.size} files, ${(packed / 1000).toFixed(1)} kB compressed`);
if (differs.length) {
  console.error(`not what the source gives: ${differs.join(", ")}; run \`make page\` and commit the result`);
  process.exit(1);
}
