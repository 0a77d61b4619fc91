// How the page asks the server. The key lives in this variable and nowhere else: it is gone when the page is closed.
import { signal } from "@preact/signals";

export const key = signal("");

export class ApiError extends Error {
  constructor(message: string, readonly status: number) {
    super(message);
  }
}

export interface Options {
  method?: string;
  body?: unknown;
  file?: Blob;
  signal?: AbortSignal;
}

/** The response to a request. Raises ApiError with the server's own words. */
export async function ask(path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = {};
  if (key.value) headers["Authorization"] = `Bearer ${key.value}`;
  let body: BodyInit | undefined;
  if (options.file) {
    headers["Content-Type"] = "application/octet-stream";
    body = options.file;
  } else if (options.body !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(options.body);
  }
  let response: Response;
  try {
    response = await fetch(path, { method: options.method ?? (body ? "POST" : "GET"), headers, body, signal: options.signal, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server can't be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await words(response), response.status);
  return response;
}

export async function json<T>(path: string, options: Options = {}): Promise<T> {
  return (await ask(path, options)).json() as Promise<T>;
}

async function words(response: Response): Promise<string> {
  try {
    const said = await response.json();
    return String(said.error?.message ?? said.doing ?? `status ${response.status}`);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export const agentPath = (name: string): string => `/v1/agents/${encodeURIComponent(name)}`;

export interface ServerEvent {
  name: string;
  data: string;
}

/** Server-sent events out of a response, as they come. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end: number;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const block = text.slice(0, end);
        text = text.slice(end + 2);
        let name = "message";
        const data: string[] = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Offer bytes as a file to be saved. */
export function save(name: string, data: Blob): void {
  const url = URL.createObjectURL(data);
  const link = document.createElement("a");
  link.href = url;
  link.download = name.replace(/[^\p{L}\p{N}._~-]+/gu, "_").slice(0, 80);
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Let a person choose a file. */
export function choose(accept: string): Promise<File | null> {
  return new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = accept;
    input.onchange = () => resolve(input.files?.[0] ?? null);
    input.oncancel = () => resolve(null);
    input.className = "chooser";
    document.body.append(input);
    input.click();
    setTimeout(() => input.remove(), 60_000);
  });
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "chooser";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
