// Confirmation before every change. The server has a page with a form for each action; this shows
// the same form in a dialog. Without scripts the link leads to that page.

async function ask(url) {
  const answer = await fetch(url, { headers: { Accept: "text/html" } });
  if (!answer.ok || answer.redirected) throw new Error("no confirmation form");
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const form = page.querySelector("form[data-ask]");
  if (!form) throw new Error("no confirmation form");
  show(document.importNode(form, true));
}

function show(form) {
  const dialog = document.createElement("dialog");
  const title = form.querySelector("h1");
  title.id = "question";
  dialog.setAttribute("aria-labelledby", "question");
  dialog.append(form);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("[data-back]")) { event.preventDefault(); dialog.close(); }
  });
  form.addEventListener("submit", () => {
    for (const button of form.querySelectorAll("button")) setTimeout(() => { button.disabled = true; });
  });
  document.body.append(dialog);
  dialog.showModal();
}

function target(form, button) {
  const data = new FormData(form, button);
  const url = new URL(button?.getAttribute("formaction") || form.getAttribute("action"), location.href);
  for (const [name, value] of data) url.searchParams.append(name, value);
  return url.href;
}

export function askFirst() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-confirm]");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    ask(link.href).catch(() => location.assign(link.href));
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-confirm]");
    if (!form) return;
    event.preventDefault();
    const url = target(form, event.submitter);
    ask(url).catch(() => location.assign(url));
  });
}
