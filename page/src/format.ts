// Numbers, sizes and times in words.
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (n: number): string => whole.format(n);

export const plural = (n: number, one: string, many = one + "s"): string => `${count(n)} ${n === 1 ? one : many}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n: number): string {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? whole.format(n) : n.toFixed(1)} ${UNITS[unit]}`;
}

/** A stretch of time: 0.4 ms, 12 ms, 4.4 s, 3 min. */
export function span(seconds: number): string {
  if (seconds < 0.001) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${whole.format(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${whole.format(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** How long ago a moment (seconds since 1970) was. */
export function ago(at: number, now: number): string {
  const seconds = Math.max(0, now - at);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${whole.format(seconds)} s ago`;
  if (seconds < 3600) return `${whole.format(seconds / 60)} min ago`;
  if (seconds < 86400) return `${whole.format(seconds / 3600)} h ago`;
  return `${plural(Math.round(seconds / 86400), "day")} ago`;
}

export const percent = (share: number): string => `${whole.format(100 * share)} %`;

export const clock = (at: number): string =>
  new Date(1000 * at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
