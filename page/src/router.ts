// Which view is shown, as the part of the address behind #.
import { signal } from "@preact/signals";

export type View = "chat" | "agents" | "live" | "model";

export interface Route {
  view: View;
  name: string; // of an agent
}

function read(): Route {
  const [, view, ...rest] = location.hash.split("/");
  let name = "";
  try {
    name = decodeURIComponent(rest.join("/"));
  } catch {
    name = "";
  }
  return { view: ["agents", "live", "model"].includes(view) ? (view as View) : "chat", name };
}

export const route = signal<Route>(read());
window.addEventListener("hashchange", () => (route.value = read()));

export const link = (view: View, name = ""): string => `#/${view}${name ? "/" + encodeURIComponent(name) : ""}`;

export function go(view: View, name = ""): void {
  location.hash = link(view, name);
}
