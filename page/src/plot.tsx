// A plot with axes and units: lines, areas or dots over the last minutes.
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { clock } from "./format";

export interface Series {
  label: string;
  colour: string; // a class: its colour follows light and dark
  points: [number, number][]; // seconds since 1970, value
  kind?: "line" | "area" | "dots";
}

interface Props {
  title: string;
  unit: string;
  series: Series[];
  from: number;
  to: number;
  show: (value: number) => string;
  log?: boolean;
  most?: number; // the axis goes at least up to here
  limit?: { value: number; label: string };
  empty: string;
}

const HEIGHT = 190;
const PAD = { left: 58, right: 12, top: 14, bottom: 26 };
const STEPS = [60, 120, 300, 600, 900];

/** No more points than pixels: of those that fall on one pixel the largest. */
export function thinned(points: [number, number][], from: number, to: number, pixels: number): [number, number][] {
  const inside = points.filter(([at]) => at >= from && at <= to);
  if (inside.length <= pixels) return inside;
  const best: [number, number][] = [];
  for (const point of inside) {
    const bin = Math.floor(((point[0] - from) / (to - from)) * pixels);
    if (best[bin] === undefined || point[1] > best[bin][1]) best[bin] = point;
  }
  return best.filter((point) => point !== undefined);
}

export function ticks(most: number): number[] {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, number) => number * step);
}

export function Plot({ title, unit, series, from, to, show, log, most: least, limit, empty }: Props): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(520);
  const [pointed, setPointed] = useState<number | null>(null);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.max(240, Math.floor(entry.contentRect.width))));
    watcher.observe(place.current!);
    return () => watcher.disconnect();
  }, []);
  const inner = { width: width - PAD.left - PAD.right, height: HEIGHT - PAD.top - PAD.bottom };
  const drawn = useMemo(() => series.map((one) => ({ ...one, points: one.kind === "dots" ? one.points.filter(([at]) => at >= from && at <= to) : thinned(one.points, from, to, inner.width) })), [series, from, to, inner.width]);
  const values = drawn.flatMap((one) => one.points.map(([, value]) => value));
  const nothing = !values.length;
  const top = Math.max(least ?? 0, limit?.value ?? 0, ...values) || 1;
  const positive = values.filter((value) => value > 0);
  const low = log ? 10 ** Math.floor(Math.log10(Math.min(...positive, top))) : 0;
  const high = log ? 10 ** Math.ceil(Math.log10(top) + 1e-9) : top * 1.08;
  const x = (at: number) => PAD.left + ((at - from) / (to - from)) * inner.width;
  const y = (value: number) => {
    const share = log ? Math.log10(Math.max(value, low) / low) / Math.max(1, Math.log10(high / low)) : value / high;
    return PAD.top + (1 - share) * inner.height;
  };
  const marks = log ? Array.from({ length: Math.round(Math.log10(high / low)) + 1 }, (_, number) => low * 10 ** number) : ticks(high);
  const span = to - from;
  const step = STEPS.find((one) => span / one <= inner.width / 70) ?? 900;
  const times: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) times.push(at);
  const near = pointed === null ? [] : drawn.map((one) => {
    let best: [number, number] | null = null;
    for (const point of one.points) if (!best || Math.abs(point[0] - pointed) < Math.abs(best[0] - pointed)) best = point;
    return { label: one.label, colour: one.colour, point: best && Math.abs(best[0] - pointed) < span / 20 ? best : null };
  }).filter((one) => one.point);
  const path = (points: [number, number][]) => {
    let text = "";
    let last = -Infinity;
    for (const [at, value] of points) {
      text += `${at - last > Math.max(15, span / 60) ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      last = at;
    }
    return text;
  };
  return (
    <figure class="plot">
      <figcaption><b>{title}</b><span>{unit}</span></figcaption>
      <div ref={place} class="plot-place">
        <svg width={width} height={HEIGHT} role="img" aria-label={`${title}, ${unit}. ${nothing ? empty : drawn.filter((one) => one.points.length).map((one) => `${one.label}: now ${show(one.points[one.points.length - 1][1])}`).join("; ")}`}
          onPointerMove={(event) => setPointed(from + ((event.offsetX - PAD.left) / inner.width) * span)} onPointerLeave={() => setPointed(null)}>
          <g class="axis">
            {!nothing && marks.map((value) => <g key={value}><line x1={PAD.left} x2={width - PAD.right} y1={y(value)} y2={y(value)} /><text x={PAD.left - 8} y={y(value) + 4} text-anchor="end">{show(value)}</text></g>)}
            {times.map((at) => <text key={at} x={Math.min(x(at), width - 18)} y={HEIGHT - 8} text-anchor="middle">{clock(at)}</text>)}
            <line class="base" x1={PAD.left} x2={width - PAD.right} y1={PAD.top + inner.height} y2={PAD.top + inner.height} />
          </g>
          {!nothing && limit && <g class="limit"><line x1={PAD.left} x2={width - PAD.right} y1={y(limit.value)} y2={y(limit.value)} /><text x={width - PAD.right - 4} y={y(limit.value) - 5} text-anchor="end">{limit.label}</text></g>}
          {drawn.map((one) => one.kind === "dots"
            ? <g key={one.label} class={`series ${one.colour}`}>{one.points.map(([at, value], number) => <circle key={number} cx={x(at)} cy={y(value)} r={4} />)}</g>
            : <g key={one.label} class={`series ${one.colour}`}>
                {one.kind === "area" && one.points.length > 1 && <path class="fill" d={`${path(one.points).replace(/(?!^)M/g, "L")}L${x(one.points[one.points.length - 1][0])} ${y(low)}L${x(one.points[0][0])} ${y(low)}Z`} />}
                <path class="stroke" d={path(one.points)} />
              </g>)}
          {pointed !== null && near.length > 0 && <line class="pointer" x1={x(near[0].point![0])} x2={x(near[0].point![0])} y1={PAD.top} y2={PAD.top + inner.height} />}
          {nothing && <text class="nothing" x={PAD.left + inner.width / 2} y={PAD.top + inner.height / 2} text-anchor="middle">{empty}</text>}
        </svg>
      </div>
      <ul class="keys">
        {drawn.map((one) => {
          const at = near.find((other) => other.label === one.label)?.point ?? (pointed === null ? one.points[one.points.length - 1] : undefined);
          return <li key={one.label}><i class={one.colour} aria-hidden="true" />{one.label}{at && <b>{show(at[1])}</b>}</li>;
        })}
        {pointed !== null && near.length > 0 && <li class="when">{new Date(1000 * near[0].point![0]).toLocaleTimeString("en-GB")}</li>}
      </ul>
    </figure>
  );
}
