// Keeps relative times such as "3 min ago" current, by the server's clock and not the browser's.

let offset = 0;

export function measureClock(root) {
  const told = root.querySelector('meta[name="holdfast-now"]');
  if (told) offset = Number(told.content) * 1000 - Date.now();
}

export function span(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

function tell(time) {
  const seconds = (Date.parse(time.dateTime) - Date.now() - offset) / 1000;
  if (time.dataset.relative === "age") return span(-seconds);
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `in ${span(seconds)}` : `${span(-seconds)} ago`;
}

// The title has the time in UTC, or in a schedule's zone; the viewer's own is added.
function own(time) {
  if (time.dataset.own !== undefined) return;
  time.dataset.own = "";
  const text = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
  time.title += `\nyour time: ${text}`;
}

export function renewTimes(root = document) {
  for (const time of root.querySelectorAll("time[data-relative]")) {
    own(time);
    const text = tell(time);
    if (time.textContent !== text) time.textContent = text;
  }
}

export function keepTimes() {
  measureClock(document);
  renewTimes();
  setInterval(() => document.hidden || renewTimes(), 1000);
}
