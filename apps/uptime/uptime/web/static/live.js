// Renews what is shown: asks for the page again every few seconds, while somebody looks at it.
// Without this script the pages are complete, and as old as their last load.
"use strict";
const EVERY = 3000;
let tag = null;
async function renew() {
  const main = document.querySelector("main[data-live]");
  if (!main || document.hidden || main.contains(document.activeElement)) return;
  try {
    const answer = await fetch(location.pathname, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status !== 200 || answer.redirected) return;
    tag = answer.headers.get("ETag");
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.querySelector("main[data-live]");
    if (fresh && fresh.innerHTML !== main.innerHTML) main.replaceChildren(...fresh.childNodes);
  } catch {
    // the server is away: what is shown stays
  }
}
setInterval(renew, EVERY);
