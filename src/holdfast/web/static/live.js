// Live pages. The server says what kind of thing changed; the page then fetches itself and replaces
// its live regions, so pages are rendered in one place only: on the server. A hidden tab holds no
// connection and catches up when it is shown again.

import { measureClock, renewTimes } from "./times.js";

const LEAST_MS = 700;
let source = null;
let last = "";
let dirty = false;
let busy = false;
let ended = 0;
let took = 0;
let timer = 0;
let trouble = 0;

const regions = () => [...document.querySelectorAll("[data-live]")];
// What a filter changes, too: older parts of a list are not live, but they follow the filters.
const filtered = () => [...document.querySelectorAll("[data-live], [data-filtered]")];
const light = () => document.querySelector("[data-light]");

function show(state, text) {
  const one = light();
  if (!one) return;
  one.dataset.state = state;
  one.textContent = text;
}

function touched(region) {
  const active = document.activeElement;
  if (active && region.contains(active) && active.matches("input:not([type=checkbox]), select, textarea")) return true;
  if ([...region.querySelectorAll("textarea")].some((one) => one.value !== one.defaultValue)) return true;
  const chosen = document.getSelection();
  return Boolean(chosen && !chosen.isCollapsed && region.contains(chosen.anchorNode));
}

function remember(region) {
  const keep = { open: [], shut: [], checked: [], focus: "", scroll: [] };
  for (const one of region.querySelectorAll("details[id]")) (one.open ? keep.open : keep.shut).push(one.id);
  for (const one of region.querySelectorAll("input[type=checkbox]:checked")) keep.checked.push([one.name, one.value]);
  for (const one of region.querySelectorAll(".scroll")) keep.scroll.push(one.scrollLeft);
  const active = document.activeElement;
  if (active && region.contains(active)) keep.focus = active.id ? `#${CSS.escape(active.id)}` : hrefOf(active);
  return keep;
}

function hrefOf(element) {
  const href = element.getAttribute("href");
  return href ? `a[href="${CSS.escape(href)}"]` : "";
}

function restore(region, keep) {
  for (const id of keep.open) region.querySelector(`details#${CSS.escape(id)}`)?.setAttribute("open", "");
  for (const id of keep.shut) region.querySelector(`details#${CSS.escape(id)}`)?.removeAttribute("open");
  for (const [name, value] of keep.checked) {
    const box = region.querySelector(`input[type=checkbox][name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
    if (box) box.checked = true;
  }
  region.querySelectorAll(".scroll").forEach((one, n) => { one.scrollLeft = keep.scroll[n] || 0; });
  if (keep.focus) region.querySelector(keep.focus)?.focus({ preventScroll: true });
}

function exchange(page, changing) {
  let left = false;
  for (const region of changing) {
    const fresh = page.getElementById(region.id);
    if (fresh?.dataset.live) region.dataset.live = fresh.dataset.live;
    if (!fresh || fresh.innerHTML === region.innerHTML) continue;
    if (touched(region)) { left = true; continue; }
    const keep = remember(region);
    region.replaceChildren(...[...fresh.childNodes].map((node) => document.importNode(node, true)));
    restore(region, keep);
    region.dispatchEvent(new CustomEvent("renewed", { bubbles: true }));
  }
  return left;
}

export async function renew(url = location.href, changing = regions()) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, cache: "no-store" });
  if (answer.redirected || answer.status === 401) { location.assign(answer.redirected ? answer.url : location.href); return false; }
  if (!answer.ok) throw new Error(`the page answered ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  measureClock(page);
  const left = exchange(page, changing);
  renewTimes();
  return left;
}

async function catchUp() {
  timer = 0;
  if (busy || !dirty || document.hidden) return;
  if (document.querySelector("dialog[open]")) { plan(1000); return; }
  busy = true;
  dirty = false;
  const begun = performance.now();
  try {
    if (await renew()) { dirty = true; }
  } catch {
    dirty = true;
    show("lost", "no response");
  } finally {
    busy = false;
    ended = performance.now();
    took = ended - begun;
    if (dirty) plan(2000);
  }
}

function plan(least = 0) {
  if (timer || document.hidden) return;
  // Slow pages refresh less often: fetching takes at most a quarter of the time.
  const wait = Math.max(least, LEAST_MS, 3 * took) - (performance.now() - ended);
  timer = setTimeout(catchUp, Math.max(0, wait));
}

function changed(topics) {
  const mine = regions().some((region) => {
    const wanted = region.dataset.live.split(" ");
    return topics.includes("all") || topics.some((topic) => wanted.includes(topic));
  });
  if (mine) { dirty = true; plan(); }
}

function open() {
  if (source || document.hidden || !regions().length) return;
  const path = document.querySelector('meta[name="holdfast-live"]')?.content;
  if (!path) return;
  light()?.removeAttribute("hidden");
  source = new EventSource(last ? `${path}?after=${encodeURIComponent(last)}` : path);
  source.addEventListener("open", () => { clearTimeout(trouble); trouble = 0; show("live", "live"); });
  // The server ends streams every minute and the browser resumes at once: not worth showing.
  source.addEventListener("error", () => { trouble ||= setTimeout(() => show("lost", "reconnecting"), 4000); });
  source.addEventListener("changed", (event) => {
    last = event.lastEventId || last;
    show("live", "live");
    changed(event.data.split(" "));
  });
}

function close() {
  clearTimeout(trouble);
  trouble = 0;
  source?.close();
  source = null;
  show("", "paused");
}

export function keepLive() {
  if (!regions().length) light()?.setAttribute("hidden", "");
  open();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); } else { open(); dirty = true; plan(); }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted) { open(); dirty = true; plan(); } });
  keepFilters();
}

// Filters apply as they are changed; without scripts their button applies them.
function keepFilters() {
  const form = document.querySelector("form[data-filters]");
  if (!form) return;
  let wait = 0;
  const act = () => {
    const data = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    const url = `${form.getAttribute("action")}${data.size ? `?${data}` : ""}`;
    history.replaceState(null, "", url);
    form.setAttribute("aria-busy", "true");
    renew(url, filtered()).then(open).catch(() => location.assign(url)).finally(() => form.removeAttribute("aria-busy"));
  };
  form.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(act, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(wait); act(); });
}
