// Keyboard shortcuts: `g` and a letter opens a page, `j` and `k` move between rows, `/` focuses the
// search, `f` the filter of the page, `?` shows help, where single keys can be switched off, e.g. for voice input.

const STORE = "holdfast-keys";
let waiting = "";
let timer = 0;

const on = () => localStorage.getItem(STORE) !== "off";
const typing = (element) => element?.closest?.("input:not([type=checkbox]), select, textarea, [contenteditable]");

function walk(step) {
  const rows = [...document.querySelectorAll("main tbody tr a[data-main], main a[data-main]")];
  const all = [...new Set(rows)];
  if (!all.length) return;
  const now = all.indexOf(document.activeElement);
  all[Math.min(all.length - 1, Math.max(0, now < 0 ? 0 : now + step))].focus();
}

function go(letter) {
  const link = document.querySelector(`nav a[data-key="${CSS.escape(letter)}"]`);
  if (link) link.click();
}

function help() {
  const dialog = document.getElementById("help");
  if (!dialog || dialog.open) return;
  const box = dialog.querySelector("input");
  box.checked = on();
  dialog.showModal();
}

const ACTIONS = {
  j: () => walk(1),
  k: () => walk(-1),
  "/": () => document.querySelector("[data-search]")?.focus(),
  f: () => document.querySelector("[data-filter]")?.focus(),
  "?": help,
  t: () => document.querySelector("[data-theme-switch]")?.click(),
};

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (document.querySelector("dialog[open]") || (!on() && event.key !== "?")) return;
    if (waiting) { waiting = ""; clearTimeout(timer); go(event.key); event.preventDefault(); return; }
    if (event.key === "g") { waiting = "g"; timer = setTimeout(() => { waiting = ""; }, 1500); return; }
    const action = ACTIONS[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  document.addEventListener("click", (event) => { if (event.target.closest("[data-help]")) help(); });
  const dialog = document.getElementById("help");
  dialog?.addEventListener("change", (event) => localStorage.setItem(STORE, event.target.checked ? "on" : "off"));
  dialog?.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("[data-back]")) { event.preventDefault(); dialog.close(); }
  });
}
