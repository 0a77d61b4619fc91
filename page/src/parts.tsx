// Small parts that several views use.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import { copy } from "./api";

const PATHS: Record<string, string> = {
  chat: "M4 5h16v11H9l-5 4z",
  agents: "M4 6h16M4 12h16M4 18h10",
  live: "M3 13h4l3-8 4 14 3-6h4",
  model: "M5 5h14v14H5zM9 1v4M15 1v4M9 19v4M15 19v4M1 9h4M1 15h4M19 9h4M19 15h4",
  plus: "M12 5v14M5 12h14",
  send: "M5 12h14M13 6l6 6-6 6",
  stop: "M7 7h10v10H7z",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  again: "M20 11a8 8 0 1 0-2.3 6M20 5v6h-6",
  copy: "M9 9h11v11H9zM5 15V4h11",
  fork: "M7 5v14M7 12h4a5 5 0 0 0 5-5V5M4 5h6M13 5h6M4 19h6",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M14 4v6M6 14v6",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  down: "M6 9l6 6 6-6",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16.5 16.5L21 21",
  close: "M6 6l12 12M18 6L6 18",
  pin: "M9 4h6l-1 6 4 4H6l4-4zM12 14v6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  tick: "M5 12l5 5 9-10",
  down2: "M12 4v11M7 11l5 5 5-5M5 20h14",
  up: "M12 20V9M7 13l5-5 5 5M5 4h14",
  tool: "M14 6a4 4 0 0 0 5 5l-8 8a2.8 2.8 0 0 1-4-4l8-8",
};

export function Icon({ name }: { name: string }): JSX.Element {
  if (name === "more") return <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" fill="currentColor"><circle cx="5" cy="12" r="2" /><circle cx="12" cy="12" r="2" /><circle cx="19" cy="12" r="2" /></svg>;
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface ButtonProps {
  icon?: string;
  label: string;
  onClick: () => void;
  text?: boolean; // show the label as text
  kind?: "main" | "danger" | "plain";
  disabled?: boolean;
  pressed?: boolean;
  id?: string;
}

export function Button({ icon, label, onClick, text, kind = "plain", disabled, pressed, id }: ButtonProps): JSX.Element {
  return (
    <button type="button" id={id} class={`button ${kind}${text ? "" : " bare"}`} onClick={onClick} disabled={disabled} aria-pressed={pressed} aria-label={text ? undefined : label} title={text ? undefined : label}>
      {icon && <Icon name={icon} />}
      {text && <span>{label}</span>}
    </button>
  );
}

export function CopyButton({ text, what }: { text: string; what: string }): JSX.Element {
  const [done, setDone] = useState(false);
  useEffect(() => {
    if (!done) return;
    const timer = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timer);
  }, [done]);
  return <Button icon={done ? "tick" : "copy"} label={done ? "Copied" : `Copy ${what}`} onClick={() => void copy(text).then(setDone)} />;
}

/** A dialog of the browser's own: it keeps the focus inside and closes with Escape. */
export function Dialog({ title, onClose, children, kind = "" }: { title: string; onClose: () => void; children: ComponentChildren; kind?: string }): JSX.Element {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = ref.current!;
    if (!dialog.open) dialog.showModal();
    return () => dialog.close();
  }, []);
  return (
    <dialog ref={ref} class={kind} aria-label={title} onCancel={(event) => { event.preventDefault(); onClose(); }} onClick={(event) => { if (event.target === ref.current) onClose(); }}>
      <div class="inside">
        <header><h2>{title}</h2><Button icon="close" label="Close" onClick={onClose} /></header>
        {children}
      </div>
    </dialog>
  );
}

interface Question {
  title: string;
  text?: string;
  value?: string;
  label?: string;
  action: string;
  danger?: boolean;
  answer: (value: string | null) => void;
}

export const question = signal<Question | null>(null);

/** Ask a person for a name, or whether something shall be done. Null: no. */
export function prompt(asked: Omit<Question, "answer">): Promise<string | null> {
  return new Promise((resolve) => {
    question.value = { ...asked, answer: (value) => { question.value = null; resolve(value); } };
  });
}

export function QuestionDialog(): JSX.Element | null {
  const asked = question.value;
  return asked && <OneQuestion key={asked.title} asked={asked} />;
}

function OneQuestion({ asked }: { asked: Question }): JSX.Element {
  const [value, setValue] = useState(asked.value ?? "");
  const wantsText = asked.value !== undefined;
  return (
    <Dialog title={asked.title} onClose={() => asked.answer(null)}>
      <form onSubmit={(event) => { event.preventDefault(); if (!wantsText || value.trim()) asked.answer(wantsText ? value.trim() : "yes"); }}>
        {asked.text && <p class="quiet">{asked.text}</p>}
        {wantsText && (
          <label class="field"><span>{asked.label ?? "Name"}</span>
            <input value={value} maxLength={256} autofocus onInput={(event) => setValue(event.currentTarget.value)} onFocus={(event) => event.currentTarget.select()} />
          </label>
        )}
        <footer>
          <Button label="Cancel" text onClick={() => asked.answer(null)} />
          <button type="submit" class={`button ${asked.danger ? "danger" : "main"}`}>{asked.action}</button>
        </footer>
      </form>
    </Dialog>
  );
}

export const notice = signal<{ text: string; bad: boolean } | null>(null);
let noticeTimer = 0;

/** Say something at the edge of the page for a few seconds. */
export function say(text: string, bad = false): void {
  notice.value = { text, bad };
  clearTimeout(noticeTimer);
  noticeTimer = window.setTimeout(() => (notice.value = null), bad ? 8000 : 3500);
}

export function Notice(): JSX.Element {
  const said = notice.value;
  return (
    <div class="notice-place" role="status" aria-live="polite">
      {said && <div class={`notice${said.bad ? " bad" : ""}`}><span>{said.text}</span><Button icon="close" label="Dismiss" onClick={() => (notice.value = null)} /></div>}
    </div>
  );
}

export function Empty({ icon, title, children }: { icon: string; title: string; children?: ComponentChildren }): JSX.Element {
  return <div class="empty"><div class="empty-icon"><Icon name={icon} /></div><h2>{title}</h2><div>{children}</div></div>;
}

/** A menu below a button. */
export function Menu({ label, icon, items }: { label: string; icon: string; items: { label: string; icon?: string; act: () => void; danger?: boolean; disabled?: boolean }[] }): JSX.Element {
  const [open, setOpen] = useState(false);
  const ref = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!open) return;
    const away = (event: Event) => { if (!ref.current?.contains(event.target as Node)) setOpen(false); };
    const escape = (event: KeyboardEvent) => { if (event.key === "Escape") { setOpen(false); ref.current?.querySelector("button")?.focus(); } };
    document.addEventListener("pointerdown", away);
    document.addEventListener("keydown", escape);
    ref.current?.querySelector<HTMLButtonElement>("[role=menuitem]")?.focus();
    return () => { document.removeEventListener("pointerdown", away); document.removeEventListener("keydown", escape); };
  }, [open]);
  const move = (event: KeyboardEvent) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const all = [...ref.current!.querySelectorAll<HTMLButtonElement>("[role=menuitem]:not(:disabled)")];
    const at = all.indexOf(document.activeElement as HTMLButtonElement) + (event.key === "ArrowDown" ? 1 : -1);
    all[(at + all.length) % all.length]?.focus();
  };
  return (
    <div class="menu" ref={ref}>
      <button type="button" class="button plain bare" aria-haspopup="menu" aria-expanded={open} aria-label={label} title={label} onClick={() => setOpen(!open)}><Icon name={icon} /></button>
      {open && (
        <div role="menu" aria-label={label} onKeyDown={move}>
          {items.map((item) => (
            <button key={item.label} type="button" role="menuitem" class={item.danger ? "danger" : ""} disabled={item.disabled} onClick={() => { setOpen(false); item.act(); }}>
              {item.icon && <Icon name={item.icon} />}<span>{item.label}</span>
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
